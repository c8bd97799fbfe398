"""Compensation and selection of deep gradient compression, tensor by tensor (Lin et al. 2017, arXiv 1712.01887)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 31
"""Number of candidate thresholds for which elements are counted, centred on the tensor's last threshold."""
SHIFT = 18
"""Number of low bits that are zero in a candidate threshold's FP32 form, which leaves 32 thresholds per octave."""
SPACING = 1 + 1 / 32
"""Largest ratio of neighbouring candidate thresholds."""
CENTRE = LEVELS // 2
INFINITE = 0x7F800000
"""Bit pattern of infinity in FP32; that of NaN is larger."""
LEAST = 1e-30
"""Minimum threshold: a threshold of zero could never grow again."""


class Settings(NamedTuple):
    """Settings of one tensor: momentum, whether it is Nesterov momentum, and `most`, the maximum number of elements
    sent.
    """

    momentum: float
    nesterov: bool
    most: int


class Sent(NamedTuple):
    """Elements that are sent: `most` slots for each tensor, concatenated over all tensors.

    Attributes:
        values: FP32; zeros where fewer are beyond the threshold.
        places: Indices in the concatenated tensors, int32; that of the tensor's first element for an unused slot.
        thresholds: (T), thresholds of the next step.
    """

    values: Tensor
    places: Tensor
    thresholds: Tensor


@torch.no_grad()
def compensate_and_select(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    unsent: Sequence[Tensor],
    thresholds: Tensor,
    settings: Sequence[Settings],
) -> Sent:
    """Accumulate a step's gradients into the unsent values and extract the largest of these, in place.

    With m and u momentum and momenta, v what was not sent, g the gradient: u <- m u + g, v <- v + u (Nesterov:
    u <- m (u + g), v <- v + u + g). The threshold is the lowest of `LEVELS` around the last step's beyond which lie no
    more than `most` elements. Those are taken, and the first of the elements between it and the next lower one, up to
    `most`: without these a step in which elements lie close together would send next to nothing, and so would all
    later ones, as the threshold rises with the elements. Where more lie beyond the highest, the first `most` of them
    are taken, and the next step's threshold is half way, in octaves, to the largest element. Elements that are taken
    become zero in u and v. NaN counts as infinite, so that it is sent and not kept for ever.

    Args:
        thresholds: (T), thresholds of the last step.
    """
    values, places, found, offset = [], [], [], 0
    for n, (g, u, v) in enumerate(zip(gradients, momenta, unsent, strict=True)):
        own = settings[n]
        if own.nesterov:
            u.add_(g).mul_(own.momentum)
            v.add_(u).add_(g)
        else:
            v.add_(u.mul_(own.momentum).add_(g))
        flat_u, flat_v = u.view(-1), v.view(-1)
        levels = levels_around(thresholds[n]).to(v.dtype)
        size = flat_v.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        beyond = (size >= levels[:, None]).sum(1)
        fits = (beyond <= own.most).nonzero().flatten()
        number = int(fits[0]) if len(fits) else LEVELS - 1
        level, below = levels[number], levels[max(number - 1, 0) if len(fits) else number]
        above, between = size >= level, (size >= below) & (size < level)
        taken = torch.cat([above.nonzero(), between.nonzero()]).flatten()[: own.most]
        values.append(torch.nn.functional.pad(flat_v[taken], (0, own.most - len(taken))))
        places.append(torch.nn.functional.pad(taken, (0, own.most - len(taken))) + offset)
        found.append(level if len(fits) else level.sqrt() * size.amax().sqrt())
        flat_v[taken], flat_u[taken] = 0.0, 0.0
        offset += g.numel()
    return Sent(torch.cat(values), torch.cat(places).int(), torch.stack(found))


def levels_around(threshold: Tensor) -> Tensor:
    """Return the candidate thresholds centred on a tensor's last threshold, or on the minimum threshold after an
    overflow.
    """
    usable = threshold.nan_to_num(nan=0.0, posinf=0.0).clamp(min=LEAST).float()
    lowest = ((usable.view(torch.int32) >> SHIFT) - CENTRE).clamp(max=(INFINITE >> SHIFT) - LEVELS + 1)
    number = torch.arange(LEVELS, dtype=torch.int32, device=threshold.device)
    return ((lowest + number) << SHIFT).view(torch.float32)
