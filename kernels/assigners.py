"""Patterns of kernels that assign boxes to candidates: parts of a loss, recognised by the assigner classes of this
package.
"""

from __future__ import annotations

from typing import Any

from steptune.kernels.base import Pattern
from steptune.kernels.triton_device import unavailable


def assigner_pattern(plain: type, fused: type, what: str, *operators: str) -> Pattern:
    """Return the pattern that replaces an object of class `plain`, which is part of a loss, with one of class `fused`,
    which calls the kernel.
    """

    def refusal(part: Any) -> str | None:
        return "" if type(part) is plain else None

    def replace(part: Any) -> None:
        part.__class__ = fused

    return Pattern(what=what, refusal=refusal, replace=replace, operators=operators, unavailable=unavailable)
