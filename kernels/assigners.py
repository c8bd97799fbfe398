"""Patterns of kernels that assign boxes: parts of a loss, which are of the classes that this package has for them."""

from __future__ import annotations

from typing import Any

from steptune.kernels.base import Pattern
from steptune.kernels.triton_device import unavailable


def assigner_pattern(plain: type, fused: type, what: str, operator: str) -> Pattern:
    """Return the pattern of a loss's part of one class, which the kernel computes in another."""

    def refusal(part: Any) -> str | None:
        return "" if type(part) is plain else None

    def replace(part: Any) -> None:
        part.__class__ = fused

    return Pattern(what=what, refusal=refusal, replace=replace, operators=(operator,), unavailable=unavailable)
