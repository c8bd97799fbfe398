"""Kernels in a model: where one can compute, why it cannot, and how the model is made to call it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from steptune.kernels.base import Kernel
from steptune.kernels.registry import KERNELS, kernel_named

_MARK = "_steptune_kernel"
_SHOWN = 3
"""Refusals of modules that are said."""


def refusals(model: torch.nn.Module, device: torch.device) -> dict[str, str]:
    """Say of each kernel that has a pattern why it cannot compute a part of a model; empty where it can."""
    return {k.name: _refusal(k, model, device) for k in KERNELS if k.pattern is not None}


def use_kernel(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Let a kernel compute all modules that it can, in place.

    Raises:
        ValueError: There is none that it can, with the reason.
    """
    kernel = kernel_named(name)
    assert kernel.pattern is not None, "only kernels with a pattern are offered"
    served = [module for module, reason in _sites(kernel, model).values() if not reason]
    if not served:
        raise ValueError(f"{name}: {_said(kernel, _sites(kernel, model))}")
    for module in served:
        kernel.pattern.replace(module)
        module.__dict__[_MARK] = name
    return model


def used_kernels(model: torch.nn.Module) -> frozenset[str]:
    """Name the kernels that a model was made to call."""
    return frozenset(module.__dict__[_MARK] for module in model.modules() if _MARK in module.__dict__)


def operators_of(name: str) -> tuple[str, ...]:
    """Give the parts of names by which a profile shows a kernel."""
    kernel = kernel_named(name)
    return () if kernel.pattern is None else kernel.pattern.operators


def _refusal(kernel: Kernel, model: torch.nn.Module, device: torch.device) -> str:
    """Say first what is of the model: nobody should install something for a kernel that has no use."""
    assert kernel.pattern is not None
    return _said(kernel, _sites(kernel, model)) or kernel.pattern.unavailable(device)


_Sites = Mapping[str, tuple[torch.nn.Module, str]]


def _sites(kernel: Kernel, model: torch.nn.Module) -> _Sites:
    """Give the modules of the pattern, by name, with the reason why the kernel cannot compute it, or nothing."""
    assert kernel.pattern is not None
    found = {}
    for name, module in model.named_modules():
        reason = kernel.pattern.refusal(module)
        if reason is not None and module.__dict__.get(_MARK) is None:
            found[name] = (module, reason)
    return found


def _said(kernel: Kernel, sites: _Sites) -> str:
    """Say why a kernel can compute none of its sites; empty where it can one."""
    assert kernel.pattern is not None
    if not sites:
        return f"the model has nothing that it computes ({kernel.pattern.what})"
    if any(not reason for _, reason in sites.values()):
        return ""
    reasons = list(dict.fromkeys(reason for _, reason in sites.values()))
    return "; ".join(" ".join(reason.split()) for reason in reasons[:_SHOWN])
