"""Setting of `optimizer_implementation`: for-loop, foreach or fused update, over contiguous parameters or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class OptimizerImplementationSetting(Setting):
    strategy: ClassVar[str] = "optimizer_implementation"

    implementation: Literal[None, "for_loop", "foreach", "fused"] = None
    contiguous: bool = False
