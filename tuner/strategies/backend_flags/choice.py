"""Setting of `backend_flags`: cuDNN benchmark, TF32 for remaining FP32 matmuls, flushing of denormals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class BackendFlagsSetting(Setting):
    strategy: ClassVar[str] = "backend_flags"

    cudnn_benchmark: bool = False
    tf32: bool = False
    flush_denormals: bool = False
