"""Reference LAMB, tensor by tensor (You et al., "Large Batch Optimization for Deep Learning", 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Settings(NamedTuple):
    """Hyperparameters of one tensor's update at one step; they cover the published variants.

    Attributes:
        rate: Learning rate, with the bias correction of variants that put it there.
        decay1: Decay of the mean of gradients.
        share1: Weight of a new gradient in their mean: 1 - decay1, or 1 without averaging.
        decay2: Decay of the mean of squares.
        share2: Weight of a new squared gradient in their mean.
        mean_correction: Factor of the mean.
        root_correction: Factor of the root of the mean of squares.
        eps: Added to that root.
        weight_decay: Added to the update, times the weights.
        shrink: Factor of the weights before the update: decoupled decay.
        adapts: Whether the update is scaled by the ratio of norms.
        largest_ratio: Maximum of the ratio of norms.
        largest_weight_norm: Maximum of the weights' norm in the ratio.
    """

    rate: float
    decay1: float
    share1: float
    decay2: float
    share2: float
    mean_correction: float = 1.0
    root_correction: float = 1.0
    eps: float = 1e-6
    weight_decay: float = 0.0
    shrink: float = 1.0
    adapts: bool = True
    largest_ratio: float = math.inf
    largest_weight_norm: float = math.inf


@torch.no_grad()
def lamb(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    settings: Sequence[Settings],
    max_grad_norm: float | None = None,
) -> Tensor:
    """Update parameters, running means of gradients, and running means of squared gradients in place by LAMB; the
    gradients are not changed.

    Args:
        parameters: Tensors of any shape.
        gradients: Gradient of each parameter, as `means` (of gradients) and `squares` (means of their squares).
        settings: Settings of each parameter.
        max_grad_norm: Norm of all gradients together to which they are clipped; None clips nothing.

    Returns:
        (T, 3): norm of the weights, norm of the update, ratio by which it was scaled.
    """
    clip = 1.0
    if max_grad_norm is not None:
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        clip = (norm / max_grad_norm).clamp(min=1.0)
    found = []
    for p, gradient, mean, square, s in zip(parameters, gradients, means, squares, settings, strict=True):
        g = gradient / clip
        mean.mul_(s.decay1).add_(g, alpha=s.share1)
        square.mul_(s.decay2).addcmul_(g, g, value=s.share2)
        p.mul_(s.shrink)
        update = mean * s.mean_correction / (square.sqrt() * s.root_correction + s.eps) + s.weight_decay * p
        weight_norm, update_norm = p.norm().clamp(max=s.largest_weight_norm), update.norm()
        usable = (weight_norm > 0) & (update_norm > 0)
        ratio = torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm))
        ratio = ratio.clamp(max=s.largest_ratio)
        factor = ratio if s.adapts else torch.ones_like(ratio)
        p.sub_(s.rate * factor * update)
        found.append(torch.stack([weight_norm, update_norm, ratio]))
    return torch.stack(found)
