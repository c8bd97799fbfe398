"""Setting of `gradient_compression`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from steptune.tuner.strategies.api import Setting

FEEDS_BACK = ("one_bit", "powersgd", "dgc")
"""Techniques with error feedback: what a step does not send is kept for later steps."""
WHOLE_TENSORS = ("powersgd", "dgc")
"""Techniques that compress each tensor as a whole, instead of flat sequences of numbers."""


@dataclass(frozen=True, kw_only=True)
class GradientCompressionSetting(Setting):
    strategy: ClassVar[str] = "gradient_compression"

    method: Literal[None, "fp16", "bf16", "int8", "one_bit", "powersgd", "dgc"] = None
    rank: Annotated[int, range(1, 1025)] = 4
    ratio: Annotated[float, 0.001, 0.01, 0.1, 1.0] = 0.01
    warm_up_steps: Annotated[int, range(10000001)] = 16
