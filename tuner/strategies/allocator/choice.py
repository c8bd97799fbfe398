"""Setting of `allocator`: expandable segments of the CUDA caching allocator, and maximum size of blocks to split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from steptune.tuner.strategies.api import Setting

MIN_SPLIT_MB, MAX_SPLIT_MB = 21, 1 << 20
"""Minimum and maximum split size in MiB. Torch refuses sizes up to 20 MiB, because it serves large requests from blocks
of 20 MiB.
"""


@dataclass(frozen=True, kw_only=True)
class AllocatorSetting(Setting):
    strategy: ClassVar[str] = "allocator"

    expandable_segments: bool = False
    max_split_size_mb: Annotated[int | None, None, range(MIN_SPLIT_MB, MAX_SPLIT_MB)] = None
