"""Workloads of a millisecond per step that have something for every strategy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import SequentialSampler, TensorDataset

import steptune

NUM_SAMPLES = 32


class AttentionBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        return x + self.mlp(attended.transpose(1, 2).reshape(batch, tokens, width))


class TinyViT(nn.Module):
    """A convolution, two attention blocks and a classifier."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, width, kernel_size=2, stride=2)
        self.blocks = nn.ModuleList(AttentionBlock(width, 2, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def image_data(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    """Seeded random images of 3 x 8 x 8 pixels with four classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num_samples, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(4, (num_samples,), generator=generator))


class Everything(steptune.Workload):
    """Convolution, attention, repeated blocks, a splittable batch; samples in order, no dropout."""

    global_batch = 8
    max_global_batch = 16

    def model(self) -> nn.Module:
        return TinyViT()

    def dataset(self) -> Any:
        return image_data()

    def sampler(self, dataset: Any) -> Any:
        return SequentialSampler(dataset)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)


class Products(Everything):
    """Two blocks of one bare matrix product each: compiled without generating a single kernel."""

    def model(self) -> nn.Module:
        blocks = nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(2)))
        return nn.Sequential(nn.Flatten(), blocks, nn.Linear(192, 4, bias=False))


class Line(steptune.Workload):
    """Least squares on a line: gradients that can be computed by hand."""

    global_batch = 4

    def model(self) -> nn.Module:
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def dataset(self) -> Any:
        x = torch.arange(36, dtype=torch.float32).reshape(12, 3) / 36
        return TensorDataset(x, x.sum(1))

    def sampler(self, dataset: Any) -> Any:
        return SequentialSampler(dataset)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(model(x).squeeze(1), y + 1)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
