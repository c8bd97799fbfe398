"""Combination rules of `local_sgd`: refused combinations and dropped parameters."""

from __future__ import annotations

from steptune.tuner.strategies.api import Conflict, Dropped
from steptune.tuner.strategies.gradient_compression.choice import GradientCompressionSetting
from steptune.tuner.strategies.hierarchical_allreduce.choice import HierarchicalAllreduceSetting
from steptune.tuner.strategies.local_sgd.choice import LocalSgdSetting
from steptune.tuner.strategies.parallel_mesh.choice import ParallelMeshSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting
from steptune.tuner.strategies.sharding.choice import ShardingSetting

CONFLICTS = (
    Conflict(
        between=(LocalSgdSetting, ParallelMeshSetting),
        when=lambda s, e, w: s[LocalSgdSetting].every != 1 and s[ParallelMeshSetting].splits_model,
        reason="local SGD averages models over all ranks, but the ranks of a mesh hold different parameters",
    ),
    Conflict(
        between=(LocalSgdSetting, ShardingSetting),
        when=lambda s, e, w: s[LocalSgdSetting].every != 1 and s[ShardingSetting].mode != "ddp",
        reason="local SGD needs the whole model and the whole optimizer state on each rank",
    ),
    Conflict(
        between=(LocalSgdSetting, GradientCompressionSetting),
        when=lambda s, e, w: s[LocalSgdSetting].every != 1 and s[GradientCompressionSetting].method is not None,
        reason="local SGD sends no gradients that could be compressed",
    ),
    Conflict(
        between=(LocalSgdSetting, HierarchicalAllreduceSetting),
        when=lambda s, e, w: s[LocalSgdSetting].every != 1 and s[HierarchicalAllreduceSetting].levels == 2,
        reason="local SGD has two levels of its own: set inside=True to reduce gradients within hosts in every step "
        "and average models between hosts",
    ),
    Conflict(
        between=(LocalSgdSetting, PrecisionSetting),
        when=lambda s, e, w: (
            s[LocalSgdSetting].every != 1
            and s[PrecisionSetting].dtype == "float16"
            and s[PrecisionSetting].level != "O3"
        ),
        reason="loss scalers of different ranks would skip different steps and learning-rate schedules would "
        "diverge: use bfloat16",
    ),
)

DROPPED = (
    Dropped(
        setting=LocalSgdSetting,
        parameters=("warm_up_steps", "inside"),
        when=lambda s: s[LocalSgdSetting].every == 1,
        reason="every=1 has no local steps",
    ),
)
