"""Deep gradient compression over all tensors at once; README.md derives it, `reference.py` defines it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from steptune.kernels.deep_gradient.reference import LEVELS, Sent, Settings
from steptune.kernels.deep_gradient.reference import compensate_and_select as reference
from steptune.kernels.multi_tensor import prepare

__all__ = ["Sent", "Settings", "compensate_and_select", "reference"]

BLOCK = 128
"""Number of chunks whose histograms a program sums at a time."""
PART = 512
"""Number of elements from which a program selects at a time."""


@torch.no_grad()
def compensate_and_select(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    unsent: Sequence[Tensor],
    thresholds: Tensor,
    settings: Sequence[Settings],
) -> Sent:
    """Accumulate a step's gradients into the unsent values and extract the largest of these, in place.

    Args:
        gradients: Dense FP32 tensors on one device; `momenta` and `unsent` in their shapes and strides.
        thresholds: (T) FP32, of the last step; see `reference`.
    """
    from steptune.kernels.deep_gradient import kernel

    device = thresholds.device
    launch = prepare(
        list(zip(gradients, momenta, unsent, strict=True)), [(s.momentum, float(s.nesterov)) for s in settings]
    )
    constants, table, num_chunks = launch.constants, launch.addresses, launch.num_chunks
    columns = {name: constants[name] for name in ("COLUMNS", "LONGEST")}
    wanted, slots, elements, no_places = _places(
        tuple(own.most for own in settings), tuple(g.numel() for g in gradients), device
    )
    counts = torch.empty((num_chunks, LEVELS + 1), dtype=torch.int32, device=device)
    largest, before, filled = torch.empty((3, num_chunks), dtype=torch.int32, device=device)
    bounds = torch.empty((len(settings), 2), dtype=torch.int32, device=device)
    thresholds = thresholds.contiguous()
    next_thresholds = torch.empty_like(thresholds)
    kernel.deep_gradient_compensate[(num_chunks,)](
        table, launch.numbers, launch.tensor_of_chunk, thresholds, counts, largest, **constants
    )
    kernel.deep_gradient_choose[(len(settings),)](
        table, thresholds, wanted, counts, largest, bounds, before, filled, next_thresholds, **columns, BLOCK=BLOCK
    )
    values, places = torch.zeros(len(no_places), dtype=torch.float32, device=device), no_places.clone()
    kernel.deep_gradient_select[(num_chunks,)](
        table,
        launch.tensor_of_chunk,
        bounds,
        before,
        filled,
        wanted,
        slots,
        elements,
        values,
        places,
        **{**constants, "num_warps": 1},
        PART=PART,
    )
    return Sent(values, places, next_thresholds)


@lru_cache(maxsize=64)
def _places(most: tuple[int, ...], numels: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return the index tables of the buffer of sent elements, which has `most` slots for each tensor.

    For each tensor: how many elements are sent, the index of its first slot in the sent buffer, and the index of its
    first element in the concatenated tensors. For each slot: the index that stands for "nothing sent".
    """
    first = [[0, *itertools.accumulate(numbers[:-1])] for numbers in (most, numels)]
    wanted, slots, elements = torch.tensor([list(most), *first])
    no_places = elements.int().repeat_interleave(wanted)
    return tuple(table.to(device) for table in (wanted, slots, elements, no_places))
