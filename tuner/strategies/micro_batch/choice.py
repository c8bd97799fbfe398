"""Setting of `micro_batch`: gradient accumulation over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class MicroBatchSetting(Setting):
    strategy: ClassVar[str] = "micro_batch"

    num_micro_batches: Annotated[int, range(1, 65537)] = 1
