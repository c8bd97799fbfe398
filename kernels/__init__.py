"""Fused kernels, each in a folder of its own beside its slow reference.

`KERNELS` lists ours and those that other packages register by the entry point `steptune.kernels`. All of it loads
torch, and `KERNELS` those packages, so each is imported when it is asked for: processes that must not load torch need
`steptune.kernels.names` only.
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
