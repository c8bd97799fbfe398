"""Devices that run Triton kernels."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def unavailable(device: torch.device) -> str:
    """Say why the kernel cannot run on a device; empty where it can."""
    if find_spec("triton") is None:
        return "requires Triton, which is not installed here (PyTorch for CUDA brings it)"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "requires a CUDA device: on a CPU Triton interprets kernels, for tests only"
    return ""
