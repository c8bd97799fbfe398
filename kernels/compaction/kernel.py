"""Triton kernel of coordinate compaction: one program per block of points, which selects from two tensors of values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compact_pairs(
    first,
    second,
    chosen,
    from_first,
    from_second,
    num_points,
    num_boxes,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy, for each point of a block, the row of its chosen box from both tensors of values, which have `FIRST` and
    `SECOND` columns.
    """
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_there = p < num_points
    row = p.to(tl.int64) * num_boxes + tl.load(chosen + p, mask=is_there, other=0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    is_first = is_there[:, None] & (part < FIRST)[None, :]
    is_second = is_there[:, None] & (part < SECOND)[None, :]
    mine = tl.load(first + row[:, None] * FIRST + part[None, :], mask=is_first)
    other = tl.load(second + row[:, None] * SECOND + part[None, :], mask=is_second)
    out = p.to(tl.int64)[:, None]
    tl.store(from_first + out * FIRST + part[None, :], mine, mask=is_first)
    tl.store(from_second + out * SECOND + part[None, :], other, mask=is_second)
