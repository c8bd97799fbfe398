"""Combination rules of `sharding`: refused combinations and dropped parameters."""

from __future__ import annotations

from steptune.tuner.records import Environment
from steptune.tuner.strategies.api import Conflict, Dropped, Settings
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.fused_kernels.choice import FusedKernelsSetting
from steptune.tuner.strategies.gradient_compression.choice import GradientCompressionSetting
from steptune.tuner.strategies.hierarchical_allreduce.choice import HierarchicalAllreduceSetting
from steptune.tuner.strategies.memory_format.choice import MemoryFormatSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.optimizer_algorithm.choice import OptimizerAlgorithmSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting
from steptune.tuner.strategies.sharding.choice import ShardingSetting
from steptune.tuner.training.wide_reduction import is_needed


def _sends_own_format(settings: Settings, environment: Environment) -> bool:
    """Say whether gradient compression sends the 16-bit gradients of O2 as they are, although O2 alone would sum them
    in FP32.
    """
    precision = settings[PrecisionSetting]
    own = {"bfloat16": "bf16", "float16": "fp16"}.get(str(precision.dtype))
    needed = is_needed(environment.num_ranks, str(precision.dtype))
    return precision.level == "O2" and needed and settings[GradientCompressionSetting].method == own


CONFLICTS = (
    Conflict(
        between=(GradientCompressionSetting, PrecisionSetting),
        when=lambda s, e, w: (
            s[GradientCompressionSetting].method is not None
            and (
                s[PrecisionSetting].level == "O3"
                or (s[PrecisionSetting].level == "O2" and not s[ShardingSetting].is_fsdp)
            )
            and not _sends_own_format(s, e)
        ),
        reason="16-bit gradients are too coarse to add the compression error to: to send 16-bit instead of FP32 "
        "gradients at O2, use method bf16 on more than two ranks, or fp16 with float16",
    ),
    Conflict(
        between=(ShardingSetting, PrecisionSetting),
        when=lambda s, e, w: (
            s[ShardingSetting].is_fsdp
            and s[ShardingSetting].cpu_offload
            and s[PrecisionSetting].dtype == "float16"
            and s[PrecisionSetting].level != "O3"
        ),
        reason="the loss scaler checks gradients on the device, but offloaded gradients are in host memory: use "
        "bfloat16",
    ),
    Conflict(
        between=(ShardingSetting, MemoryFormatSetting),
        when=lambda s, e, w: s[ShardingSetting].is_fsdp and s[MemoryFormatSetting].layout == "channels_last",
        reason="FSDP requires parameters in contiguous memory format, not channels_last",
    ),
    Conflict(
        between=(ShardingSetting, OptimizerImplementationSetting),
        when=lambda s, e, w: s[ShardingSetting].mode != "ddp" and s[OptimizerImplementationSetting].contiguous,
        reason="sharding splits each parameter across ranks, but `contiguous` flattens all parameters into one tensor",
    ),
    Conflict(
        between=(ShardingSetting, OptimizerAlgorithmSetting),
        when=lambda s, e, w: (
            s[ShardingSetting].mode != "ddp" and s[OptimizerAlgorithmSetting].algorithm not in (None, "adamw")
        ),
        reason="the algorithm needs whole parameters, but each rank holds only a part",
    ),
    Conflict(
        between=(ShardingSetting, GradientCompressionSetting),
        when=lambda s, e, w: s[ShardingSetting].is_fsdp and s[GradientCompressionSetting].method not in (None, "bf16"),
        reason="FSDP reduce-scatters gradients itself and has no hook for this compression: use method bf16, "
        "which FSDP supports",
    ),
    Conflict(
        between=(ShardingSetting, GradientCompressionSetting),
        when=lambda s, e, w: s[ShardingSetting].mode == "zero1" and s[GradientCompressionSetting].method == "dgc",
        reason="deep gradient compression replaces the momentum of the optimizer, but under ZeRO-1 each rank's "
        "optimizer holds only a part of the parameters",
    ),
    Conflict(
        between=(ShardingSetting, HierarchicalAllreduceSetting),
        when=lambda s, e, w: s[ShardingSetting].is_fsdp and s[HierarchicalAllreduceSetting].levels == 2,
        reason="FSDP reduce-scatters gradients itself: use sharding mode hybrid for two levels",
    ),
    Conflict(
        between=(ShardingSetting, FusedKernelsSetting),
        when=lambda s, e, w: (
            s[ShardingSetting].is_fsdp and s[ShardingSetting].wrap == "size" and s[FusedKernelsSetting].is_on
        ),
        reason="FSDP gathers a unit's parameters when its modules are called, but with wrap=size a fused kernel "
        "bypasses some of these calls: use wrap=block",
    ),
)

DROPPED = (
    Dropped(
        setting=ShardingSetting,
        parameters=(
            *("wrap", "min_num_params", "reshard", "prefetch", "backward_prefetch"),
            *("cpu_offload", "ignored", "reduce_each"),
        ),
        when=lambda s: not s[ShardingSetting].is_fsdp,
        reason="every rank holds all parameters",
    ),
    Dropped(
        setting=ShardingSetting,
        parameters=("min_num_params",),
        when=lambda s: s[ShardingSetting].wrap != "size",
        reason="min_num_params applies to wrap=size only",
    ),
    Dropped(
        setting=ShardingSetting,
        parameters=("reshard",),
        when=lambda s: s[ShardingSetting].mode == "grad_op",
        reason="parameters stay unsharded until the backward pass",
    ),
    Dropped(
        setting=ShardingSetting,
        parameters=("backward_prefetch",),
        when=lambda s: (
            s[ShardingSetting].mode == "grad_op"
            or (s[ShardingSetting].mode == "hybrid" and not s[ShardingSetting].reshard)
        ),
        reason="the backward pass gathers no parameters",
    ),
    Dropped(
        setting=ShardingSetting,
        parameters=("reduce_each",),
        when=lambda s: s[MicroBatchSetting].num_micro_batches == 1,
        reason="the step has a single micro-batch",
    ),
    Dropped(
        setting=DdpBucketsSetting,
        parameters=("bucket_cap_mb", "first_bucket_mb", "static_graph", "bucket_views", "find_unused"),
        when=lambda s: s[ShardingSetting].is_fsdp,
        reason="FSDP does not use DDP's buckets",
    ),
)
