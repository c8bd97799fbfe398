"""Techniques that can be changed: each one file, and one entry in `STRATEGIES`."""

from __future__ import annotations

from collections.abc import Sequence

from steptune.tuner.errors import ChoiceError
from steptune.tuner.strategies.activation_checkpointing import ActivationCheckpointing
from steptune.tuner.strategies.activation_compression import ActivationCompression
from steptune.tuner.strategies.allocator import Allocator
from steptune.tuner.strategies.attention_backend import AttentionBackend
from steptune.tuner.strategies.attention_mask import AttentionMask
from steptune.tuner.strategies.backend_flags import BackendFlags
from steptune.tuner.strategies.base import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.compile import Compile
from steptune.tuner.strategies.cpu_threads import CpuThreads
from steptune.tuner.strategies.cuda_graph import CudaGraph
from steptune.tuner.strategies.data_loading import DataLoading
from steptune.tuner.strategies.dataset_cache import DatasetCache
from steptune.tuner.strategies.ddp_buckets import DdpBuckets
from steptune.tuner.strategies.device_prefetch import DevicePrefetch
from steptune.tuner.strategies.fused_kernels import FusedKernels
from steptune.tuner.strategies.gradient_compression import GradientCompression
from steptune.tuner.strategies.hierarchical_allreduce import HierarchicalAllreduce
from steptune.tuner.strategies.larger_global_batch import LargerGlobalBatch
from steptune.tuner.strategies.length_balancing import LengthBalancing
from steptune.tuner.strategies.local_sgd import LocalSgd
from steptune.tuner.strategies.memory_format import MemoryFormat
from steptune.tuner.strategies.micro_batch import MicroBatch
from steptune.tuner.strategies.model_recipe import ModelRecipe
from steptune.tuner.strategies.moe_experts import MoeExperts
from steptune.tuner.strategies.nccl_settings import NcclSettings
from steptune.tuner.strategies.optimizer_algorithm import OptimizerAlgorithm
from steptune.tuner.strategies.optimizer_implementation import OptimizerImplementation
from steptune.tuner.strategies.parallel_mesh import ParallelMesh
from steptune.tuner.strategies.precision import Precision
from steptune.tuner.strategies.sharding import Sharding
from steptune.tuner.wording import no_such

STRATEGIES: tuple[Strategy, ...] = (
    DataLoading(),
    DevicePrefetch(),
    DatasetCache(),
    CpuThreads(),
    BackendFlags(),
    Precision(),
    MemoryFormat(),
    AttentionBackend(),
    AttentionMask(),
    FusedKernels(),
    Compile(),
    CudaGraph(),
    OptimizerImplementation(),
    ActivationCheckpointing(),
    ActivationCompression(),
    Allocator(),
    MicroBatch(),
    LengthBalancing(),
    OptimizerAlgorithm(),
    ModelRecipe(),
    LargerGlobalBatch(),
    MoeExperts(),
    Sharding(),
    ParallelMesh(),
    DdpBuckets(),
    GradientCompression(),
    HierarchicalAllreduce(),
    NcclSettings(),
    LocalSgd(),
)


def strategy_named(name: str, strategies: Sequence[Strategy] = STRATEGIES) -> Strategy:
    """The strategy of this name.

    Raises:
        ChoiceError: There is none; names those that exist.
    """
    for strategy in strategies:
        if strategy.name == name:
            return strategy
    raise ChoiceError(no_such("strategy", name, (strategy.name for strategy in strategies)))


__all__ = ["STRATEGIES", "Strategy", "Support", "Supported", "Unsupported", "strategy_named"]
