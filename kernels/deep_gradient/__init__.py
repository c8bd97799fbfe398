"""Deep gradient compression over all tensors at once; README.md derives it, `reference.py` defines it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from steptune.kernels.deep_gradient.reference import CENTRE, LEVELS, SPACING, Sent, Settings, usable
from steptune.kernels.deep_gradient.reference import compensate_and_select as reference
from steptune.kernels.multi_tensor import prepare

__all__ = ["Sent", "Settings", "compensate_and_select", "reference"]


@torch.no_grad()
def compensate_and_select(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    unsent: Sequence[Tensor],
    thresholds: Tensor,
    settings: Sequence[Settings],
) -> Sent:
    """Add a step's gradients to what was not sent yet, and take the largest of it, in place.

    Args:
        gradients: Dense FP32 tensors on one device; `momenta` and `unsent` in their shapes and strides.
        thresholds: (T) FP32, of the last step; see `reference`.
    """
    from steptune.kernels.deep_gradient import kernel

    device = thresholds.device
    launch = prepare(
        list(zip(gradients, momenta, unsent, strict=True)), [(s.momentum, float(s.nesterov)) for s in settings]
    )
    constants = launch.constants
    powers = torch.tensor(SPACING, dtype=torch.float32).pow(torch.arange(LEVELS) - CENTRE)
    most = [own.most for own in settings]
    table = torch.tensor(
        [
            most,
            [0, *itertools.accumulate(most[:-1])],
            [0, *itertools.accumulate(g.numel() for g in gradients[:-1])],
        ]
    ).to(device, non_blocking=True)
    wanted, slots, elements = table
    levels = usable(thresholds)[:, None] * powers.to(device, non_blocking=True)
    counts = torch.empty((launch.num_chunks, LEVELS), dtype=torch.int32, device=device)
    kernel.deep_gradient_compensate[(launch.num_chunks,)](
        launch.addresses, launch.numbers, launch.tensor_of_chunk, levels, counts, **constants
    )
    tensor = launch.tensor_of_chunk.long()
    beyond = torch.zeros((len(settings), LEVELS), dtype=torch.int32, device=device).index_add_(0, tensor, counts)
    fits = beyond <= wanted[:, None]
    has_fit = fits.any(1)
    high = torch.where(has_fit, fits.int().argmax(1), LEVELS - 1)
    chosen = torch.stack([torch.where(has_fit, (high - 1).clamp(min=0), high), high], 1)
    own = counts.gather(1, chosen[tensor])
    own[:, 0] -= own[:, 1]
    running = own.cumsum(0) - own
    before = running - running[launch.addresses[:, 1]][tensor]
    before[:, 0] += beyond.gather(1, high[:, None]).squeeze(1)[tensor]
    bounds = levels.gather(1, chosen)
    values = torch.zeros(sum(most), dtype=torch.float32, device=device)
    places = elements.int().repeat_interleave(wanted, output_size=len(values))
    kernel.deep_gradient_select[(launch.num_chunks,)](
        launch.addresses,
        launch.tensor_of_chunk,
        bounds,
        before[:, 1].contiguous(),
        before[:, 0].contiguous(),
        wanted,
        slots,
        elements,
        values,
        places,
        **constants,
    )
    sender = torch.arange(len(settings), device=device).repeat_interleave(wanted, output_size=len(values))
    highest = bounds[:, 1]
    largest = torch.zeros_like(highest).scatter_reduce(0, sender, values.abs(), "amax")
    return Sent(values, places, torch.where(has_fit, highest, highest.sqrt() * largest.sqrt()))
