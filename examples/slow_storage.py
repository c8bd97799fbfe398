"""A plain training script whose samples come from slow storage, for which a sleep stands: its step waits for data.

    steptune tune --budget 4m -- python examples/slow_storage.py

The wait does not depend on how busy the machine is, so that the answer does not, either.
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader

NUM_SAMPLES = 20_000


class SlowStorage(torch.utils.data.Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        time.sleep(0.01)  # a request to the storage
        sample = torch.full((64,), index / NUM_SAMPLES)
        return sample, sample[:8]


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(SlowStorage(), batch_size=8, shuffle=True)
    for _ in range(10):
        for samples, targets in loader:
            loss = nn.functional.mse_loss(model(samples), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
