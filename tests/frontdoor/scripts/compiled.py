"""A compiled model under autocast; its graph must hold none of the wrappers, or it would be compiled again."""

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(800, 8), torch.randn(800, 8))
inner = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
model = torch.compile(inner, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, batch_size=8):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.7f} {counters['stats']['unique_graphs']} {len(counters['graph_break'])}", flush=True)
