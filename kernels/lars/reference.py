"""Reference LARS, tensor by tensor (You et al., "Large Batch Training of Convolutional Networks", 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Settings(NamedTuple):
    """Hyperparameters of one tensor's update at one step; they cover the published variants.

    Attributes:
        rate: Factor of the step: the learning rate, or 1 where the momentum includes it.
        kept: Share of the momentum that is kept; 0 in a first step.
        share: Weight of the scaled gradient in the momentum: 1 minus the dampening, or the learning rate.
        weight_decay: Added to the gradient, times the weights.
        trust: Factor of the ratio of norms.
        eps: Added to the ratio's denominator.
        adapts: Whether the gradient is scaled by the ratio of norms.
        divisor: What a bounded ratio is divided by: the learning rate (LARC), else 1.
        largest_ratio: Maximum of the ratio of norms.
        momentum: Factor of Nesterov's look-ahead; with 0 the step is the momentum itself.
    """

    rate: float
    kept: float
    share: float
    weight_decay: float = 0.0
    trust: float = 1e-3
    eps: float = 0.0
    adapts: bool = True
    divisor: float = 1.0
    largest_ratio: float = math.inf
    momentum: float = 0.0


@torch.no_grad()
def lars(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor] | None,
    settings: Sequence[Settings],
) -> Tensor:
    """Update parameters and momenta in place by LARS; the gradients are not changed.

    Args:
        parameters: Tensors of any shape.
        gradients: Gradient of each parameter.
        momenta: Momentum of each parameter; None steps by the scaled gradients themselves.
        settings: Settings of each parameter.

    Returns:
        (T, 3): norm of the weights, norm of the gradient, ratio by which that was scaled.
    """
    found = []
    for number, (p, g, s) in enumerate(zip(parameters, gradients, settings, strict=True)):
        weight_norm, gradient_norm = p.norm(), g.norm()
        usable = (weight_norm > 0) & (gradient_norm > 0)
        trusted = s.trust * weight_norm / (gradient_norm + s.weight_decay * weight_norm + s.eps)
        ratio = torch.where(usable, trusted, torch.ones_like(trusted)) / s.divisor
        ratio = ratio.clamp(max=s.largest_ratio)
        factor = ratio if s.adapts else torch.ones_like(ratio)
        step = (g + s.weight_decay * p) * factor
        if momenta is not None:
            momenta[number].mul_(s.kept).add_(step, alpha=s.share)
            step = step + s.momentum * momenta[number] if s.momentum else momenta[number]
        p.sub_(s.rate * step)
        found.append(torch.stack([weight_norm, gradient_norm, ratio]))
    return torch.stack(found)
