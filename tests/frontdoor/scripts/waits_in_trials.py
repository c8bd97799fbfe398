"""Trains; in a trial, which is a fork, it waits after some steps, with a child process of its own."""

import os
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

started = os.getpid()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(640, 4)), batch_size=4)):
    model(x).square().sum().backward()
    optimizer.step()
    if step == 3 and os.getpid() != started:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"waiting {os.getpid()} {child.pid}", flush=True)
        time.sleep(600)
