"""Setting of `attention_mask`: causal attention by a flag instead of a computed mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class AttentionMaskSetting(Setting):
    strategy: ClassVar[str] = "attention_mask"

    is_causal: bool = False
