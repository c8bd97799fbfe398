"""Contexts of a forward pass: those that the plan requests, and its autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.plan import Plan


@contextmanager
def forward_contexts(plan: Plan, device: torch.device, *, cache_casts: bool | None = None) -> Iterator[None]:
    """Enter the plan's contexts for a forward pass.

    Args:
        cache_casts: Whether autocast caches casts of weights; None leaves that to torch.
    """
    import torch

    with ExitStack() as stack:
        for context in plan.step.contexts:
            stack.enter_context(context())
        if plan.step.autocast_dtype:
            dtype = getattr(torch, plan.step.autocast_dtype)
            stack.enter_context(torch.autocast(device.type, dtype=dtype, cache_enabled=cache_casts))
        yield
