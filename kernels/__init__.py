"""Fused kernels: one folder per kernel, each with a slow reference implementation.

`KERNELS` lists Steptune's kernels and those that other packages register by the entry point `steptune.kernels`. The
package loads torch, and `KERNELS` loads those other packages, so both are imported on first use. Processes that must
not load torch need `steptune.kernels.names` only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steptune.kernels.base import Case, Kernel, Pattern
    from steptune.kernels.registry import KERNELS, kernel_named

__all__ = ["KERNELS", "Case", "Kernel", "Pattern", "kernel_named"]

_MODULES = {"KERNELS": "registry", "kernel_named": "registry", "Case": "base", "Kernel": "base", "Pattern": "base"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
