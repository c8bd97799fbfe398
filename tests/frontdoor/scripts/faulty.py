"""A plain loop that trains otherwise where a variable says so: what a wrong candidate would do."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fault = os.environ.get("PLANTED", "none")
torch.manual_seed(0)
x = torch.randn(1600, 16)
y = (x.sum(1) > 0).long()
if fault == "raises":
    raise RuntimeError("the script's own words")
if fault == "data":
    x = x * 1.001
if fault == "order":
    torch.manual_seed(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=fault != "order")
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape))
if fault == "gradients":
    model[0].weight.register_hook(lambda gradient: 1.01 * gradient)
if fault == "state":
    model[1].momentum = 0.2
optimizer = torch.optim.AdamW(model.parameters(), lr=1.01e-3 if fault == "rate" else 1e-3)
for _ in range(int(sys.argv[-1]) if "--epochs" in sys.argv else 1):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        if fault == "crashes" and torch.autograd._profiler_enabled():
            os.kill(os.getpid(), signal.SIGSEGV)
        optimizer.step()
        if fault == "between":  # no part of any update
            with torch.no_grad():
                model[0].weight.clamp_(-0.49, 0.49)
        print(f"loss {loss.item():.7f}", flush=True)
