"""Watches itself, by one line beside the import."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if "--watch" in sys.argv:
    import steptune
else:
    steptune = None

torch.manual_seed(0)
num_samples = 40 if "--short" in sys.argv else 800
data = TensorDataset(torch.randn(num_samples, 8), torch.randn(num_samples, 8))
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8, shuffle=True)
for x, y in steptune.watch(loader) if steptune else loader:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.7f}", flush=True)
print("the end")
