"""Triton kernels of 8-bit blocks: several rows per program."""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDING = tl.constexpr(12582912.0)
"""Rounding constant 1.5 x 2^23: adding and subtracting it rounds an FP32 number to an integer, halves to even."""
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def int8_encode(blocks, payload, scales, num_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write rows as int8 with their scales; a row with a non-finite element gets a non-finite scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_there = row < num_rows
    places = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    numbers = tl.load(blocks + places, mask=is_there[:, None], other=0.0).to(tl.float32)
    is_none = tl.max((numbers != numbers).to(tl.int32), 1) > 0
    scale = tl.where(is_none, float("nan"), tl.max(tl.abs(numbers), 1) / 127.0)
    tl.store(scales + row, scale, mask=is_there)
    shares = numbers / tl.maximum(scale, TINY)[:, None]
    is_usable = (shares >= -127.5) & (shares <= 127.5)
    rounded = (tl.where(is_usable, shares, 0.0) + ROUNDING) - ROUNDING
    tl.store(payload + places, rounded.to(tl.int8), mask=is_there[:, None])


@triton.jit
def int8_mean(payload, scales, found, num_rows, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the mean of the ranks' rows, summed in rank order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_there = row < num_rows
    places = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        numbers = tl.load(payload + rank * num_rows * BLOCK + places, mask=is_there[:, None], other=0)
        scale = tl.load(scales + rank * num_rows + row, mask=is_there, other=0.0)
        total += numbers.to(tl.float32) * scale[:, None]
    tl.store(found + places, total / RANKS, mask=is_there[:, None])
