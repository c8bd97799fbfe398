"""Setting of `data_loading`: worker processes, prefetch depth, pinned memory, persistent workers, epochs ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class DataLoadingSetting(Setting):
    strategy: ClassVar[str] = "data_loading"

    num_workers: Annotated[int, range(1025)] = 0
    prefetch_factor: Annotated[int | None, None, range(1, 1025)] = 2
    persistent_workers: bool = False
    pin_memory: bool = False
    epochs_ahead: bool = False
