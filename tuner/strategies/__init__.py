"""What can be changed: one technique, one file, one entry in `STRATEGIES`."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.errors import ChoiceError
from tuner.strategies.activation_checkpointing import ActivationCheckpointing
from tuner.strategies.activation_compression import ActivationCompression
from tuner.strategies.allocator import Allocator
from tuner.strategies.attention_backend import AttentionBackend
from tuner.strategies.attention_mask import AttentionMask
from tuner.strategies.backend_flags import BackendFlags
from tuner.strategies.base import Strategy, Support, Supported, Unsupported
from tuner.strategies.compile import Compile
from tuner.strategies.cpu_threads import CpuThreads
from tuner.strategies.cuda_graph import CudaGraph
from tuner.strategies.data_loading import DataLoading
from tuner.strategies.dataset_cache import DatasetCache
from tuner.strategies.ddp_buckets import DdpBuckets
from tuner.strategies.device_prefetch import DevicePrefetch
from tuner.strategies.gradient_compression import GradientCompression
from tuner.strategies.hierarchical_allreduce import HierarchicalAllreduce
from tuner.strategies.larger_global_batch import LargerGlobalBatch
from tuner.strategies.length_balancing import LengthBalancing
from tuner.strategies.local_sgd import LocalSgd
from tuner.strategies.memory_format import MemoryFormat
from tuner.strategies.micro_batch import MicroBatch
from tuner.strategies.model_recipe import ModelRecipe
from tuner.strategies.moe_experts import MoeExperts
from tuner.strategies.nccl_settings import NcclSettings
from tuner.strategies.optimizer_algorithm import OptimizerAlgorithm
from tuner.strategies.optimizer_implementation import OptimizerImplementation
from tuner.strategies.parallel_mesh import ParallelMesh
from tuner.strategies.precision import Precision
from tuner.strategies.sharding import Sharding

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
    raise ChoiceError(f"there is no strategy {name!r}: the strategies are {', '.join(s.name for s in strategies)}")


__all__ = ["STRATEGIES", "Strategy", "Support", "Supported", "Unsupported", "strategy_named"]
