"""Blocks of numbers in 8 bits with a scale each, and the mean of several such (Wang et al. 2023, arXiv 2306.10209)."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127


@torch.no_grad()
def encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Give rows (R, N) as int8 (R, N) and scales (R): a 127th of the largest of each row. Halves round to even."""
    scales = blocks.abs().amax(1) / LARGEST
    smallest = torch.finfo(torch.float32).tiny
    return (blocks / scales.clamp_min(smallest)[:, None]).round().to(torch.int8), scales


@torch.no_grad()
def mean_of(payload: Tensor, scales: Tensor) -> Tensor:
    """Give the mean (R, N) in FP32 of several ranks' rows (K, R, N) with scales (K, R)."""
    return (payload.float() * scales[..., None]).mean(0)
