"""Trains a few steps, then waits for long, with a loader worker and a child process of its own."""

import os
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter(DataLoader(TensorDataset(torch.randn(640, 4)), num_workers=1))
for _ in range(3):
    model(next(batches)[0]).sum().backward()
    optimizer.step()
print(f"waiting {os.getpid()} {child.pid}", flush=True)
time.sleep(600)
