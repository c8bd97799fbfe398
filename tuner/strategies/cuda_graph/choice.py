"""Setting of `cuda_graph`: record a whole step as CUDA graphs and replay it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class CudaGraphSetting(Setting):
    strategy: ClassVar[str] = "cuda_graph"

    scope: Literal[None, "step"] = None
