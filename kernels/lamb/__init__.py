"""LAMB update of all parameters at once; README.md derives it, `reference.py` defines it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steptune.kernels.lamb.reference import Settings
from steptune.kernels.lamb.reference import lamb as reference
from steptune.kernels.multi_tensor import Launch, prepare

__all__ = ["Settings", "lamb", "reference"]


@torch.no_grad()
def lamb(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    settings: Sequence[Settings],
    max_grad_norm: float | None = None,
) -> Tensor:
    """Update parameters, means and squares in place by LAMB; the gradients are not changed.

    Args:
        parameters: Dense tensors of one dtype (FP32, FP16, BF16) on one device.
        gradients: Gradient of each parameter, in its dtype and strides; so are `means` (of gradients) and `squares`
            (means of their squares).
        settings: Settings of each parameter; one object for those that share them saves time.
        max_grad_norm: Norm of all gradients together to which they are clipped; None clips nothing.

    Returns:
        (T, 3) FP32: norm of the weights, norm of the update, ratio by which it was scaled.
    """
    launch = prepare(list(zip(parameters, gradients, means, squares, strict=True)), settings)
    clip = clip_factor(gradient_squares(launch), max_grad_norm)
    return update(launch, clip)


def gradient_squares(launch: Launch) -> Tensor:
    """Return the sum of squares over all gradients in a launch."""
    from steptune.kernels.multi_tensor.kernel import squares_of_gradients

    parts = torch.empty(launch.num_chunks, dtype=torch.float32, device=launch.numbers.device)
    squares_of_gradients[(launch.num_chunks,)](launch.addresses, launch.tensor_of_chunk, parts, **launch.constants)
    return parts.sum()


def clip_factor(squares: Tensor, max_grad_norm: float | None) -> Tensor:
    """Return the factor (1,) that clips the gradients, from the sum of their squares."""
    if max_grad_norm is None:
        return torch.ones(1, dtype=torch.float32, device=squares.device)
    return (max_grad_norm / squares.sqrt()).clamp(max=1.0).reshape(1)


def update(launch: Launch, clip: Tensor) -> Tensor:
    """Update a launch's tensors in place: parameters, means and squares."""
    from steptune.kernels.lamb import kernel

    device, chunks, constants = launch.numbers.device, launch.num_chunks, launch.constants
    parts = torch.empty((2, chunks), dtype=torch.float32, device=device)
    norms = torch.empty((launch.num_tensors, 3), dtype=torch.float32, device=device)
    tables = (launch.addresses, launch.numbers)
    kernel.lamb_moments[(chunks,)](*tables, launch.tensor_of_chunk, clip, parts, chunks, **constants)
    sums = {name: constants[name] for name in ("COLUMNS", "NUMBERS", "LONGEST")}
    kernel.lamb_ratios[(launch.num_tensors,)](*tables, parts, norms, chunks, BLOCK=launch.parts_block, **sums)
    kernel.lamb_update[(chunks,)](*tables, launch.tensor_of_chunk, norms, **constants)
    return norms
