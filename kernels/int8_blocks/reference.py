"""Blocks of numbers in 8 bits with one scale each, and the mean of several ranks' blocks (Wang et al. 2023, arXiv
2306.10209).
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127


@torch.no_grad()
def encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows (R, N) as int8 (R, N) with scales (R), each 1/127 of the row's largest magnitude. Halves round to
    even.
    """
    scales = blocks.abs().amax(1) / LARGEST
    smallest = torch.finfo(torch.float32).tiny
    return (blocks / scales.clamp_min(smallest)[:, None]).round().to(torch.int8), scales


@torch.no_grad()
def mean_of(payload: Tensor, scales: Tensor) -> Tensor:
    """Return the mean (R, N), in FP32, of several ranks' encoded rows (K, R, N) with scales (K, R)."""
    return (payload.float() * scales[..., None]).mean(0)
