"""Many small operators on little data: the device waits for the host to launch the next kernel."""

import torch
import torch.nn.functional as F
from torch import nn

import tuner


class Block(nn.Module):
    """A small perceptron behind a norm, with a residual connection."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LaunchBound(tuner.Workload):
    """Regression with a deep and narrow network."""

    def __init__(self, batch=256, width=256, depth=64):
        self.global_batch = batch
        self.width, self.depth = width, depth

    def model(self):
        return nn.Sequential(
            nn.Sequential(*(Block(self.width) for _ in range(self.depth))),
            nn.LayerNorm(self.width),
            nn.Linear(self.width, 1),
        )

    def dataset(self):
        samples = torch.randn(16384, self.width, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(samples, samples[:, :4].sum(1, keepdim=True))

    def loss(self, model, batch):
        samples, targets = batch
        return F.mse_loss(model(samples), targets)
