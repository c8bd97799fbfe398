"""Setting of `compile`: mode of torch.compile, and its scope (whole model or repeated blocks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting

MODES_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record CUDA graphs of the compiled regions."""


@dataclass(frozen=True, kw_only=True)
class CompileSetting(Setting):
    strategy: ClassVar[str] = "compile"

    mode: Literal[None, "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"] = None
    scope: Literal["whole", "regional"] = "whole"
    dynamic: Literal[None, True, False] = None
