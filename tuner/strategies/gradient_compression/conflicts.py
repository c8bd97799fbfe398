"""Combination rules of `gradient_compression`: refused combinations and dropped parameters."""

from __future__ import annotations

from steptune.tuner.strategies.api import Conflict, Dropped
from steptune.tuner.strategies.gradient_compression.choice import FEEDS_BACK, GradientCompressionSetting
from steptune.tuner.strategies.optimizer_algorithm.choice import OptimizerAlgorithmSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting

CONFLICTS = (
    Conflict(
        between=(GradientCompressionSetting, PrecisionSetting),
        when=lambda s, e, w: (
            s[GradientCompressionSetting].method in FEEDS_BACK and s[PrecisionSetting].dtype == "float16"
        ),
        reason="error feedback would add the error of one step to gradients with another loss scale, and an "
        "overflow would stay in the error for good: use bfloat16",
    ),
    Conflict(
        between=(GradientCompressionSetting, OptimizerAlgorithmSetting),
        when=lambda s, e, w: (
            s[GradientCompressionSetting].method == "dgc" and s[OptimizerAlgorithmSetting].algorithm is not None
        ),
        reason="momentum correction is defined for SGD only",
    ),
    Conflict(
        between=(GradientCompressionSetting, OptimizerImplementationSetting),
        when=lambda s, e, w: (
            s[GradientCompressionSetting].method == "dgc" and s[OptimizerImplementationSetting].contiguous
        ),
        reason="momentum is corrected per parameter tensor, but contiguous parameters form one flat tensor",
    ),
)

DROPPED = (
    Dropped(
        setting=GradientCompressionSetting,
        parameters=("rank",),
        when=lambda s: s[GradientCompressionSetting].method != "powersgd",
        reason="rank applies to method powersgd only",
    ),
    Dropped(
        setting=GradientCompressionSetting,
        parameters=("ratio", "warm_up_steps"),
        when=lambda s: s[GradientCompressionSetting].method != "dgc",
        reason="ratio and warm_up_steps apply to method dgc only",
    ),
)
