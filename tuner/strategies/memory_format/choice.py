"""Setting of `memory_format`: images contiguous or channels_last; attention blocks batch-first or sequence-first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class MemoryFormatSetting(Setting):
    strategy: ClassVar[str] = "memory_format"

    layout: Literal["contiguous", "channels_last"] = "contiguous"
    batch_second: bool = False
