"""Application of kernels to a training: finding the parts that a kernel can compute, giving the reasons where it
cannot, and changing the parts.

A kernel's pattern finds modules of the model, parts of the loss (what the workload keeps in its attributes, and the
modules therein), or the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from steptune.kernels.base import OPTIMIZER, Kernel
from steptune.kernels.registry import KERNELS, kernel_named

_MARK = "_steptune_kernel"
_SHOWN = 3
"""Maximum number of refusal reasons that one message lists."""


def refusals(
    model: torch.nn.Module,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    workload: object | None = None,
) -> dict[str, str]:
    """Return, for each kernel with a pattern, the reason why it cannot be applied to any part of a training; an empty
    text if it can.
    """
    parts = _parts(model, workload)
    return {k.name: _refusal(k, parts, optimizer, device) for k in KERNELS if k.pattern is not None}


def is_of_optimizer(name: str) -> bool:
    """Say whether a kernel computes an optimizer's step rather than modules of the model."""
    kernel = kernel_named(name)
    return kernel.pattern is not None and kernel.pattern.subject == OPTIMIZER


def use_kernel(model: torch.nn.Module, name: str, workload: object | None = None) -> torch.nn.Module:
    """Replace, in place, all modules of the model and all parts of the workload's loss that a kernel can compute.

    Raises:
        ValueError: The kernel can compute none of them; the message has the reason.
    """
    _use(kernel_named(name), _parts(model, workload))
    return model


def use_kernel_in_optimizer(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Change an optimizer, in place, so that a kernel computes its step.

    Raises:
        ValueError: The kernel cannot compute the step; the message has the reason.
    """
    _use(kernel_named(name), {"": optimizer})


def used_kernels(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, workload: object | None = None
) -> frozenset[str]:
    """Return the names of the kernels that a model, its loss and its optimizer were changed to call."""
    subjects = [*_parts(model, workload).values(), *([] if optimizer is None else [optimizer])]
    return frozenset(subject.__dict__[_MARK] for subject in subjects if _MARK in subject.__dict__)


def operators_of(name: str) -> tuple[str, ...]:
    """Return the substrings of operator names by which a kernel is recognised in a profile."""
    kernel = kernel_named(name)
    return () if kernel.pattern is None else kernel.pattern.operators


_Subjects = Mapping[str, Any]
"""Modules, parts of a loss, or an optimizer, each by its name."""


def _parts(model: torch.nn.Module, workload: object | None) -> _Subjects:
    """Return, by name, the modules of the model, the attributes of the workload, and the modules and attributes inside
    these attributes.
    """
    parts = dict(model.named_modules())
    for name, value in getattr(workload, "__dict__", {}).items():
        if not isinstance(value, torch.nn.Module):
            parts[f"loss.{name}"] = value
            continue
        for own, module in value.named_modules(prefix=f"loss.{name}"):
            parts[own] = module
            parts.update({f"{own}.{key}": kept for key, kept in vars(module).items() if not key.startswith("_")})
    return {name: part for name, part in parts.items() if hasattr(part, "__dict__")}


def _use(kernel: Kernel, subjects: _Subjects) -> None:
    assert kernel.pattern is not None, "the kernel must have a pattern"
    sites = _sites(kernel, subjects)
    served = [subject for subject, reason in sites.values() if not reason]
    # Parts of a loss outlive a job: a second one of the same workload finds them replaced.
    if not served and not any(_mark_of(subject) == kernel.name for subject in subjects.values()):
        raise ValueError(f"{kernel.name}: {_said(kernel, sites)}")
    for subject in served:
        kernel.pattern.replace(subject)
        subject.__dict__[_MARK] = kernel.name


def _refusal(kernel: Kernel, parts: _Subjects, optimizer: torch.optim.Optimizer | None, device: torch.device) -> str:
    """Return why a kernel cannot be used; empty where it can.

    Reasons in the training come before a missing installation: nobody needs to install something for a kernel that has
    no use.
    """
    assert kernel.pattern is not None
    is_of_optimizer = kernel.pattern.subject == OPTIMIZER
    subjects = parts if not is_of_optimizer else {} if optimizer is None else {"": optimizer}
    return _said(kernel, _sites(kernel, subjects)) or kernel.pattern.unavailable(device)


def _mark_of(subject: Any) -> str | None:
    """Return the name of the kernel already applied to this module, part of a loss or optimizer, or None."""
    mark: str | None = subject.__dict__.get(_MARK)
    return mark


_Sites = Mapping[str, tuple[Any, str]]


def _sites(kernel: Kernel, subjects: _Subjects) -> _Sites:
    """Return, by name, every part that matches the kernel's pattern, with the reason why the kernel cannot compute that
    part; the reason is empty if it can.
    """
    assert kernel.pattern is not None
    found = {}
    for name, subject in subjects.items():
        reason = kernel.pattern.refusal(subject)
        if reason is not None and _mark_of(subject) is None:
            found[name] = (subject, reason)
    return found


def _said(kernel: Kernel, sites: _Sites) -> str:
    """Return why a kernel can compute none of the matching parts; the reason is empty if it can compute at least
    one.
    """
    assert kernel.pattern is not None
    if not sites:
        whose = "training" if kernel.pattern.subject == OPTIMIZER else "model"
        return f"the {whose} contains no part that this kernel computes ({kernel.pattern.what})"
    if any(not reason for _, reason in sites.values()):
        return ""
    reasons = list(dict.fromkeys(reason for _, reason in sites.values()))
    return "; ".join(" ".join(reason.split()) for reason in reasons[:_SHOWN])
