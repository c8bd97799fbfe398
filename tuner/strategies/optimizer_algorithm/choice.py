"""Setting of `optimizer_algorithm`: AdamW, LAMB, LARS, Adafactor or SM3 in place of the user's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting

IMPLEMENTATIONS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("for_loop", "foreach", "fused"),
    "adafactor": ("for_loop", "foreach"),
}
"""Implementations that `optimizer_implementation` can request, by algorithm; the other algorithms have a single one."""


@dataclass(frozen=True, kw_only=True)
class OptimizerAlgorithmSetting(Setting):
    strategy: ClassVar[str] = "optimizer_algorithm"

    algorithm: Literal[None, "adamw", "lamb", "lars", "adafactor", "sm3"] = None
