"""Names of the kernels that a model can be given, without loading torch or any of them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

GROUP = "steptune.kernels"
"""The entry point by which other packages register kernels; its name is the kernel's."""
OURS = ("window_attention", "lamb", "lars", "simota", "fcos3d")
OF_OPTIMIZER = ("lamb", "lars")
"""Kernels of ours that compute an optimizer's step."""
WITHOUT_WAITING = ("simota", "fcos3d")
"""Kernels of ours in place of code that reads values of the device in every step."""


@cache
def pattern_names() -> tuple[str, ...]:
    """Name the kernels that replace a pattern of a model or its optimizer: ours, then those of other packages."""
    registered = sorted({entry.name for entry in entry_points(group=GROUP)} - set(OURS))
    return (*OURS, *registered)
