"""LARS update of all parameters at once; README.md derives it, `reference.py` defines it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steptune.kernels.lars.reference import Settings
from steptune.kernels.lars.reference import lars as reference
from steptune.kernels.multi_tensor import prepare

__all__ = ["Settings", "lars", "reference"]


@torch.no_grad()
def lars(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor] | None,
    settings: Sequence[Settings],
) -> Tensor:
    """Update parameters and momenta in place by LARS; the gradients are not changed.

    Args:
        parameters: Dense tensors of one dtype (FP32, FP16, BF16) on one device.
        gradients: Gradient of each parameter, in its dtype and strides; so are `momenta`.
        momenta: None steps by the scaled gradients themselves.
        settings: Settings of each parameter; one object for those that share them saves time.

    Returns:
        (T, 3) FP32: norm of the weights, norm of the gradient, ratio by which that was scaled.
    """
    from steptune.kernels.lars import kernel

    own = (parameters, gradients) if momenta is None else (parameters, gradients, momenta)
    launch = prepare(list(zip(*own, strict=True)), settings)
    device, chunks, constants = launch.numbers.device, launch.num_chunks, launch.constants
    parts = torch.empty((2, chunks), dtype=torch.float32, device=device)
    norms = torch.empty((launch.num_tensors, 3), dtype=torch.float32, device=device)
    tables = (launch.addresses, launch.numbers)
    kernel.lars_norms[(chunks,)](launch.addresses, launch.tensor_of_chunk, parts, chunks, **constants)
    sums = {name: constants[name] for name in ("COLUMNS", "NUMBERS", "LONGEST")}
    kernel.lars_ratios[(launch.num_tensors,)](*tables, parts, norms, chunks, BLOCK=launch.parts_block, **sums)
    has_momentum = momenta is not None
    kernel.lars_update[(chunks,)](*tables, launch.tensor_of_chunk, norms, HAS_MOMENTUM=has_momentum, **constants)
    return norms
