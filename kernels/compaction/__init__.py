"""Coordinate compaction in one launch; README.md derives it, `reference.py` defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from steptune.kernels.compaction.reference import compact as reference

__all__ = ["compact", "reference"]

BLOCK_P = 32
"""Points per program: 967 programs for 30,929 points, seven for each multiprocessor of an H100."""


def compact(pairs: tuple[Tensor, Tensor], chosen: Tensor) -> list[Tensor]:
    """Select, for each point, the values of its chosen box from both tensors of `pairs`, in one launch; see
    `reference`.
    """
    return list(_compact(*pairs, chosen))


@torch.library.custom_op("steptune::compact", mutates_args=())
def _compact(first: Tensor, second: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    from steptune.kernels.compaction import kernel

    num_points, num_boxes, _ = first.shape
    parts = first.shape[2], second.shape[2]
    found = tuple(
        torch.empty((num_points, own.shape[2]), dtype=own.dtype, device=own.device) for own in (first, second)
    )
    if num_points:
        kernel.compact_pairs[(-(-num_points // BLOCK_P),)](
            first.contiguous(),
            second.contiguous(),
            chosen.contiguous(),
            *found,
            num_points,
            num_boxes,
            *parts,
            BLOCK_P,
            1 << (max(parts) - 1).bit_length(),
            num_warps=4,
        )
    return found[0], found[1]


@_compact.register_fake
def _(first: Tensor, second: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return first.new_empty((len(chosen), first.shape[2])), second.new_empty((len(chosen), second.shape[2]))
