"""Combinations that `cpu_threads` refuses, drops or tries together."""

from __future__ import annotations

from steptune.tuner.strategies.api import Together
from steptune.tuner.strategies.cpu_threads.choice import CpuThreadsSetting
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting

TOGETHER = (
    Together(
        between=(DataLoadingSetting, CpuThreadsSetting), reason="loader workers and operator threads share the cores"
    ),
)
