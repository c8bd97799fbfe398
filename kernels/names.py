"""Names of the kernels that a model can be given, without loading torch or any of them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

GROUP = "steptune.kernels"
"""The entry point by which other packages register kernels; its name is the kernel's."""
OURS = ("window_attention",)


@cache
def pattern_names() -> tuple[str, ...]:
    """Name the kernels that replace a pattern of a model: ours, then those of other packages."""
    registered = sorted({entry.name for entry in entry_points(group=GROUP)} - set(OURS))
    return (*OURS, *registered)
