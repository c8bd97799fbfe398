"""Setting of `precision`: FP32, TF32, O1 (autocast), O2 (FP32 masters and norms), O3 (pure 16-bit)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class PrecisionSetting(Setting):
    strategy: ClassVar[str] = "precision"

    level: Literal["fp32", "tf32", "O1", "O2", "O3"] = "fp32"
    dtype: Literal[None, "bfloat16", "float16"] = None
