"""Setting of `fused_kernels`: fused kernels in place of what a model computes in many operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class FusedKernelsSetting(Setting):
    strategy: ClassVar[str] = "fused_kernels"

    window_attention: bool = False
    lamb: bool = False
    lars: bool = False

    @property
    def is_on(self) -> bool:
        """Some kernel is asked for."""
        return self != type(self)()
