"""All strategies: those of this package, in the order in which they change a plan, and those of other packages.

Another package names a strategy's class as an entry point of the group `steptune.strategies`; it comes after these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points

from steptune.tuner.errors import ChoiceError
from steptune.tuner.strategies.activation_checkpointing.strategy import ActivationCheckpointing
from steptune.tuner.strategies.activation_compression.strategy import ActivationCompression
from steptune.tuner.strategies.allocator.strategy import Allocator
from steptune.tuner.strategies.api import Strategy
from steptune.tuner.strategies.attention_backend.strategy import AttentionBackend
from steptune.tuner.strategies.attention_mask.strategy import AttentionMask
from steptune.tuner.strategies.backend_flags.strategy import BackendFlags
from steptune.tuner.strategies.compile.strategy import Compile
from steptune.tuner.strategies.cpu_threads.strategy import CpuThreads
from steptune.tuner.strategies.cuda_graph.strategy import CudaGraph
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.data_loading.strategy import DataLoading
from steptune.tuner.strategies.dataset_cache.strategy import DatasetCache
from steptune.tuner.strategies.ddp_buckets.strategy import DdpBuckets
from steptune.tuner.strategies.device_prefetch.strategy import DevicePrefetch
from steptune.tuner.strategies.fused_kernels.strategy import FusedKernels
from steptune.tuner.strategies.gradient_compression.strategy import GradientCompression
from steptune.tuner.strategies.hierarchical_allreduce.strategy import HierarchicalAllreduce
from steptune.tuner.strategies.larger_global_batch.strategy import LargerGlobalBatch
from steptune.tuner.strategies.length_balancing.strategy import LengthBalancing
from steptune.tuner.strategies.local_sgd.strategy import LocalSgd
from steptune.tuner.strategies.memory_format.strategy import MemoryFormat
from steptune.tuner.strategies.micro_batch.strategy import MicroBatch
from steptune.tuner.strategies.model_recipe.strategy import ModelRecipe
from steptune.tuner.strategies.moe_experts.strategy import MoeExperts
from steptune.tuner.strategies.nccl_settings.strategy import NcclSettings
from steptune.tuner.strategies.optimizer_algorithm.strategy import OptimizerAlgorithm
from steptune.tuner.strategies.optimizer_implementation.strategy import OptimizerImplementation
from steptune.tuner.strategies.parallel_mesh.strategy import ParallelMesh
from steptune.tuner.strategies.precision.strategy import Precision
from steptune.tuner.strategies.sharding.strategy import Sharding
from steptune.tuner.wording import no_such

GROUP = "steptune.strategies"


def _of_other_packages(known: Sequence[Strategy]) -> Iterator[Strategy]:
    names = {strategy.name: "Steptune" for strategy in known}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        where = f"the entry point {entry.name} = {entry.value} of {GROUP}"
        try:
            made = entry.load()
            strategy = made() if isinstance(made, type) and issubclass(made, Strategy) else None
        except Exception as error:
            raise ChoiceError(f"{where} cannot be loaded ({error}): repair or uninstall its package") from error
        if strategy is None or not hasattr(strategy, "name"):
            raise ChoiceError(f"{where} must be a subclass of Strategy with a `setting`")
        if strategy.name in names:
            raise ChoiceError(
                f"{where} is named {strategy.name!r}, but {names[strategy.name]} already has a strategy with this "
                "name: choose another name"
            )
        names[strategy.name] = entry.value
        yield strategy


_OWN: tuple[Strategy, ...] = (
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
STRATEGIES: tuple[Strategy, ...] = (*_OWN, *_of_other_packages(_OWN))


def strategy_named(name: str, strategies: Sequence[Strategy] = STRATEGIES) -> Strategy:
    """Return the strategy of this name.

    Raises:
        ChoiceError: No strategy has this name; the message lists those that exist.
    """
    for strategy in strategies:
        if strategy.name == name:
            return strategy
    raise ChoiceError(no_such("strategy", name, (strategy.name for strategy in strategies)))


def strategies_for(*cures: Cure) -> tuple[str, ...]:
    """Return the names of the strategies that apply at least one of these remedies, in the order of the remedies."""
    return tuple(dict.fromkeys(s.name for cure in cures for s in STRATEGIES if cure in s.cures))
