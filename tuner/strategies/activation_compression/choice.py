"""Setting of `activation_compression`: form of saved activations (ReLU mask, nonzero values, 16 bits or 8 bits)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class ActivationCompressionSetting(Setting):
    strategy: ClassVar[str] = "activation_compression"

    kept_as: Literal[None, "relu_mask", "relu_sparse", "bfloat16", "int8"] = None
