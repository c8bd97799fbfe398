"""Check for devices that run Triton kernels."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def unavailable(device: torch.device) -> str:
    """Return why Triton kernels cannot run on a device; empty where they can."""
    if find_spec("triton") is None:
        return "requires Triton, which is not installed here (the CUDA builds of PyTorch include it)"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "requires a CUDA device (on a CPU, Triton can only interpret kernels for tests)"
    return ""


def is_traced(tensor: Tensor) -> bool:
    """Say whether a call must go through the kernel's registered operator: PyTorch compiles, traces or transforms the
    call, or its tensor is of a subclass of `Tensor` other than `Parameter`.

    Otherwise the operator is avoided: its dispatch takes the host longer than a small batch takes the device.
    """
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    )
