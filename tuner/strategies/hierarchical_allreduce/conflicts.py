"""Combinations that `hierarchical_allreduce` refuses."""

from __future__ import annotations

from steptune.tuner.strategies.api import Conflict
from steptune.tuner.strategies.gradient_compression.choice import WHOLE_TENSORS, GradientCompressionSetting
from steptune.tuner.strategies.hierarchical_allreduce.choice import HierarchicalAllreduceSetting

CONFLICTS = (
    Conflict(
        between=(HierarchicalAllreduceSetting, GradientCompressionSetting),
        when=lambda s, e, w: (
            s[HierarchicalAllreduceSetting].levels == 2 and s[GradientCompressionSetting].method in WHOLE_TENSORS
        ),
        reason="the compression method needs whole gradient tensors, but between hosts each rank holds only a "
        "part: use bf16, fp16, int8 or one_bit with two levels",
    ),
)
