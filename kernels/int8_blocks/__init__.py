"""Encoding of blocks of numbers in 8 bits, and the mean of several ranks' blocks; README.md derives both,
`reference.py` defines them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steptune.kernels.int8_blocks.reference import encode as encode_reference
from steptune.kernels.int8_blocks.reference import mean_of as mean_reference

__all__ = ["encode", "encode_reference", "mean_of", "mean_reference"]

ELEMENTS = 4096
"""Elements per program."""


@torch.no_grad()
def encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows (R, N) as int8 (R, N) with FP32 scales (R); N is a power of two."""
    from steptune.kernels.int8_blocks import kernel

    num_rows, length = _checked(blocks)
    payload = torch.empty((num_rows, length), dtype=torch.int8, device=blocks.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=blocks.device)
    rows = max(1, ELEMENTS // length)
    if num_rows:
        kernel.int8_encode[(-(-num_rows // rows),)](
            blocks.contiguous(), payload, scales, num_rows, ROWS=rows, BLOCK=length
        )
    return payload, scales


@torch.no_grad()
def mean_of(payload: Tensor, scales: Tensor) -> Tensor:
    """Return the mean (R, N), in FP32, of several ranks' encoded rows (K, R, N) with scales (K, R)."""
    from steptune.kernels.int8_blocks import kernel

    num_rows, length = _checked(payload[0])
    found = torch.empty((num_rows, length), dtype=torch.float32, device=payload.device)
    rows = max(1, ELEMENTS // length)
    if num_rows:
        kernel.int8_mean[(-(-num_rows // rows),)](
            payload.contiguous(),
            scales.contiguous(),
            found,
            num_rows,
            RANKS=len(payload),
            ROWS=rows,
            BLOCK=length,
        )
    return found


def _checked(rows: Tensor) -> tuple[int, int]:
    num_rows, length = rows.shape
    if length & (length - 1) or not length:
        raise ValueError(f"the length of a block must be a power of two, got {length}")
    return num_rows, length
