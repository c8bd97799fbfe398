"""Models of the steps in `known_steps.py`: a transformer, a convolutional network, an MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inputs(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        return self.output(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class FirstToken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


def _feed_forward(width: int) -> Residual:
    return Residual(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _transformer(small: bool) -> tuple[nn.Sequential, tuple[int, ...]]:
    width, depth, length = (32, 2, 16) if small else (512, 8, 128)
    blocks: list[nn.Module] = []
    for _ in range(depth):
        blocks += [Residual(nn.LayerNorm(width), Attention(width, width // 16 if small else 8)), _feed_forward(width)]
    return nn.Sequential(*blocks, FirstToken(), nn.Linear(width, 10)), (length, width)


def _convolutional(small: bool) -> tuple[nn.Sequential, tuple[int, ...]]:
    channels, depth, size = (8, 2, 16) if small else (128, 12, 32)
    blocks = []
    for _ in range(depth):
        layers = [(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)) for _ in range(2)]
        blocks.append(Residual(*layers[0], nn.ReLU(), *layers[1]))
    first = nn.Conv2d(3, channels, 3, padding=1)
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)), (
        3,
        size,
        size,
    )


def _mlp(small: bool) -> tuple[nn.Sequential, tuple[int, ...]]:
    width, depth = (64, 3) if small else (512, 24)
    return nn.Sequential(*(_feed_forward(width) for _ in range(depth)), nn.Linear(width, 10)), (width,)


FAMILIES: dict[str, Callable[[bool], tuple[nn.Sequential, tuple[int, ...]]]] = {
    "transformer": _transformer,
    "convolutional": _convolutional,
    "mlp": _mlp,
}
"""Model and shape of a sample; models of a dry run are small."""
