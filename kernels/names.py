"""Names of the kernels that can be applied to a model, available without loading torch or any kernel."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

GROUP = "steptune.kernels"
"""Entry-point group by which other packages register kernels; an entry point's name is its kernel's name."""
OURS = ("window_attention", "lamb", "lars", "simota", "fcos3d")
OF_OPTIMIZER = ("lamb", "lars")
"""Steptune's kernels that compute an optimizer's step."""
WITHOUT_WAITING = ("simota", "fcos3d")
"""Steptune's kernels that make host waits unnecessary: the code that they replace reads values from the device in every
step.
"""


@cache
def pattern_names() -> tuple[str, ...]:
    """Return the names of the kernels that replace a pattern of a model or its optimizer: Steptune's, then other
    packages'.
    """
    registered = sorted({entry.name for entry in entry_points(group=GROUP)} - set(OURS))
    return (*OURS, *registered)
