"""Combination rules of `data_loading`: dropped parameters and choices to try together."""

from __future__ import annotations

from steptune.tuner.strategies.api import Dropped, Together
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting

DROPPED = (
    Dropped(
        setting=DataLoadingSetting,
        parameters=("prefetch_factor", "persistent_workers", "epochs_ahead"),
        when=lambda s: not s[DataLoadingSetting].num_workers,
        reason="prefetching and persistent workers need at least one worker",
    ),
    Dropped(
        setting=DataLoadingSetting,
        parameters=("epochs_ahead",),
        when=lambda s: not s[DataLoadingSetting].persistent_workers,
        reason="only persistent workers can begin the next epoch early",
    ),
)

TOGETHER = (
    Together(
        between=(DataLoadingSetting, CpuThreadsSetting),
        reason="loader workers and operator threads share the CPU cores",
    ),
)
