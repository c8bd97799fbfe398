"""A small model whose samples come from slow storage, for which a sleep stands: a busy machine changes it little."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true", help="the only size")
parser.add_argument("--compile", type=int, default=0)
parser.add_argument("--epochs", type=int, default=100)
options = parser.parse_args()


class SlowFiles(torch.utils.data.Dataset):
    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        time.sleep(0.01)
        sample = torch.full((64,), index / 20_000)
        return sample, sample[:8]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(SlowFiles(), batch_size=8, shuffle=True)
for epoch in range(options.epochs):
    for number, (samples, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(samples), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 100 == 0:
            print(f"epoch {epoch} step {number} loss {loss.item():.5f}", flush=True)
