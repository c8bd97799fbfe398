"""Setting of `gc_pause`: Python's garbage collection is off while training runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class GcPauseSetting(Setting):
    strategy: ClassVar[str] = "gc_pause"

    paused: bool = False
