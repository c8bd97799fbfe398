"""A loop that goes on from a checkpoint, which brings the settings of its optimizer with it."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(32, 32)


def make() -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


checkpoint = make().state_dict()
optimizer = make()
optimizer.load_state_dict(checkpoint)
for step in range(400):
    inputs = torch.randn(64, 32)
    loss = (model(inputs) - inputs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"fused {optimizer.param_groups[0]['fused']}", flush=True)
