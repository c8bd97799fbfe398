"""Combination rules of `larger_global_batch`: dropped parameters and choices to try together."""

from __future__ import annotations

from steptune.tuner.strategies.api import Dropped, Together
from steptune.tuner.strategies.larger_global_batch.choice import LargerGlobalBatchSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting

DROPPED = (
    Dropped(
        setting=LargerGlobalBatchSetting,
        parameters=("rule",),
        when=lambda s: s[LargerGlobalBatchSetting].factor == 1,
        reason="the learning-rate rule applies only if factor is above 1",
    ),
)

TOGETHER = (
    Together(
        between=(LargerGlobalBatchSetting, MicroBatchSetting),
        reason="a larger batch may fit into memory only when divided into micro-batches",
    ),
)
