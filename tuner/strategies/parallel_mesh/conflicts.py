"""Combination rules of `parallel_mesh`: refused combinations and dropped parameters."""

from __future__ import annotations

from steptune.tuner.strategies.activation_compression.choice import ActivationCompressionSetting
from steptune.tuner.strategies.api import Conflict, Dropped
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cuda_graph.choice import CudaGraphSetting
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.fused_kernels.choice import FusedKernelsSetting
from steptune.tuner.strategies.gradient_compression.choice import GradientCompressionSetting
from steptune.tuner.strategies.hierarchical_allreduce.choice import HierarchicalAllreduceSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.moe_experts.choice import MoeExpertsSetting
from steptune.tuner.strategies.optimizer_algorithm.choice import OptimizerAlgorithmSetting
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.strategies.parallel_mesh.choice import ParallelMeshSetting
from steptune.tuner.strategies.precision.choice import PrecisionSetting
from steptune.tuner.strategies.sharding.choice import ShardingSetting

CONFLICTS = (
    Conflict(
        between=(ParallelMeshSetting, FusedKernelsSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].splits_model and s[FusedKernelsSetting].is_on,
        reason="the mesh splits modules that a fused kernel computes as a whole",
    ),
    Conflict(
        between=(ParallelMeshSetting, ShardingSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].splits_model and s[ShardingSetting].mode != "ddp",
        reason="the mesh already shards parameters across ranks, and further sharding is not supported",
    ),
    Conflict(
        between=(ParallelMeshSetting, MoeExpertsSetting),
        when=lambda s, e, w: (
            s[ParallelMeshSetting].expert != 1 and s[MoeExpertsSetting].execution not in (None, "batched")
        ),
        reason="expert parallelism exchanges slots of fixed size, which needs moe_experts execution=batched",
    ),
    Conflict(
        between=(ParallelMeshSetting, MicroBatchSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].pipeline != 1 and s[MicroBatchSetting].num_micro_batches != 1,
        reason="a pipeline sets its own number of micro-batches",
    ),
    Conflict(
        between=(ParallelMeshSetting, ActivationCompressionSetting),
        when=lambda s, e, w: (
            s[ParallelMeshSetting].pipeline != 1 and s[ActivationCompressionSetting].kept_as is not None
        ),
        reason="saved-tensor hooks cannot cross pipeline-stage boundaries",
    ),
    Conflict(
        between=(ParallelMeshSetting, PrecisionSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].splits_model and s[PrecisionSetting].dtype == "float16",
        reason="the loss scaler would have to skip a step on all ranks or on none, which is not supported with a "
        "device mesh: use bfloat16",
    ),
    Conflict(
        between=(ParallelMeshSetting, PrecisionSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].splits_model and s[PrecisionSetting].level in ("O2", "O3"),
        reason="sharded master weights and 16-bit gradients are not supported with a device mesh: use O1",
    ),
    Conflict(
        between=(ParallelMeshSetting, CompileSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].splits_model and s[CompileSetting].mode is not None,
        reason="ranks communicate inside the blocks, which would break every compiled graph",
    ),
    Conflict(
        between=(ParallelMeshSetting, CudaGraphSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].splits_model and s[CudaGraphSetting].scope == "step",
        reason="ranks communicate within the step, but recording collectives in a CUDA graph is not supported",
    ),
    Conflict(
        between=(ParallelMeshSetting, OptimizerImplementationSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].splits_model and s[OptimizerImplementationSetting].contiguous,
        reason="the mesh splits each parameter across ranks, but `contiguous` flattens all parameters into one tensor",
    ),
    Conflict(
        between=(ParallelMeshSetting, OptimizerAlgorithmSetting),
        when=lambda s, e, w: (
            s[ParallelMeshSetting].splits_model and s[OptimizerAlgorithmSetting].algorithm not in (None, "adamw")
        ),
        reason="the algorithm needs whole parameters, but each rank holds only a part",
    ),
    Conflict(
        between=(ParallelMeshSetting, GradientCompressionSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].splits_model and s[GradientCompressionSetting].method is not None,
        reason="the compression hook of DDP requires the same parameters on all ranks, but the ranks of a mesh "
        "hold different parameters",
    ),
    Conflict(
        between=(ParallelMeshSetting, HierarchicalAllreduceSetting),
        when=lambda s, e, w: s[ParallelMeshSetting].splits_model and s[HierarchicalAllreduceSetting].levels == 2,
        reason="two-level all-reduce runs over all ranks, but in a mesh only ranks with the same parameters reduce "
        "gradients together",
    ),
)

DROPPED = (
    Dropped(
        setting=DdpBucketsSetting,
        parameters=("bucket_cap_mb", "first_bucket_mb", "static_graph", "bucket_views", "find_unused"),
        when=lambda s: s[ParallelMeshSetting].splits_model,
        reason="a mesh does not reduce gradients in DDP's buckets",
    ),
    Dropped(
        setting=ParallelMeshSetting,
        parameters=("schedule", "micro_batches"),
        when=lambda s: s[ParallelMeshSetting].pipeline == 1,
        reason="pipeline=1 has no pipeline stages",
    ),
)
