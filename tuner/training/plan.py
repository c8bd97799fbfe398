"""Plan of one candidate: the requests of its strategies, grouped by stage of `assemble`.

A strategy never wraps anything itself. It adds to the stage it needs, and `assemble` carries the
stages out in one fixed order. Stages that can be done only once (optimizer, step, wrap, loader)
collect arguments; stages that compose (model, cast, checkpointing, ...) collect functions, which run
in the order of the strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from steptune.tuner.records import Scalar
    from steptune.tuner.workloads.workload import Workload

ModelTransform = Callable[["torch.nn.Module", "Workload"], "torch.nn.Module"]
"""Function that takes the model and the workload, and returns the model (usually the same object)."""

BatchTransform = Callable[[Any], Any]
DatasetTransform = Callable[[Any, "Workload"], Any]


@dataclass(kw_only=True)
class LoaderArguments:
    """Arguments of the DataLoader."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    epochs_ahead: bool = False
    """True if persistent workers begin the next epoch before the current one ends."""
    device_prefetch: bool = False
    """True if each batch is copied to the device in advance, while the previous batch is computed."""
    as_bytes: bool = False
    """True if samples are loaded as bytes (`Workload.byte_dataset`) and converted on the device."""

    @property
    def capacity(self) -> int:
        """Maximum number of batches that the loader has in flight."""
        return self.num_workers * (self.prefetch_factor or 2)


@dataclass(kw_only=True)
class OptimizerArguments:
    """Execution of the user's optimizer; None keeps the user's setting."""

    implementation: str | None = None
    """Implementation: "for_loop", "foreach" or "fused"."""
    master_weights: bool = False
    """True if the optimizer holds FP32 copies of 16-bit parameters."""
    contiguous: bool = False
    """True if parameters are views of one buffer for each group and dtype."""
    capturable: bool = False
    """True if the step count and all decisions are on the device, so that a CUDA graph can contain the update."""
    algorithm: str | None = None
    """Algorithm that replaces the optimizer's, by its name in `steptune.tuner.training.optimizers.exchange`."""
    kernels: list[str] = field(default_factory=list)
    """Names of the kernels in `steptune.kernels` that compute the optimizer's step."""
    rate_factor: float = 1.0
    """Factor of every group's learning rate, applied before the scheduler is created."""


@dataclass(kw_only=True)
class StepArguments:
    """Arguments of one training step."""

    autocast_dtype: str | None = None
    loss_scaler: bool = False
    num_micro_batches: int = 1
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    """Context managers around forward and backward pass."""
    beginnings: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks at the beginning of every step."""
    captured: bool = False
    """True if forward pass, backward pass and update are recorded as CUDA graphs and replayed."""


@dataclass(kw_only=True)
class BatchArguments:
    """Grouping of samples into batches; the defaults keep the user's sampling."""

    factor: int = 1
    """Number of the user's batches that are merged into one."""
    pool_batches: int = 0
    """Number of batches in a pool; the samples of a pool are sorted by length together. With 0, nothing is sorted."""

    @property
    def is_plain(self) -> bool:
        return self.factor == 1 and self.pool_batches == 0


@dataclass(frozen=True, kw_only=True)
class CompressionArguments:
    """Arguments of gradient compression, named as in the strategy `gradient_compression`."""

    method: str
    rank: int
    ratio: float
    warm_up_steps: int


@dataclass(frozen=True, kw_only=True)
class LocalSgdArguments:
    """Arguments of local SGD, named as in the strategy `local_sgd`."""

    every: int
    warm_up_steps: int
    inside: bool


@dataclass(frozen=True, kw_only=True)
class ShardingArguments:
    """Arguments of sharding the model across ranks, named as in the strategy `sharding`."""

    mode: str
    wrap: str
    min_num_params: int
    reshard: bool
    prefetch: int
    """Number of units gathered ahead in the forward pass."""
    backward_prefetch: int = 1
    cpu_offload: bool = False
    """True if parts of parameters, gradients and optimizer states are in CPU memory, where the update runs."""
    ignored: str | None = None
    """Modules left out of sharding. With "norms", the modules that keep FP32 at O2 are whole on every rank."""
    reduce_each: bool = True
    """True if gradients are reduced after every micro-batch; otherwise their sum over all micro-batches is reduced
    once.
    """


@dataclass(frozen=True, kw_only=True)
class MeshArguments:
    """Arguments of tensor, pipeline and expert parallelism, named as in the strategy `parallel_mesh`."""

    pipeline: int = 1
    tensor: int = 1
    expert: int = 1
    schedule: str = "1f1b"
    num_micro_batches: int = 1


@dataclass(kw_only=True)
class WrapArguments:
    """Arguments of the model's data parallelism; used with more than one rank."""

    ddp: dict[str, Any] = field(default_factory=dict)
    compression: CompressionArguments | None = None
    hierarchical: bool = False
    """True if gradients are reduced inside hosts first, then between them."""
    local_sgd: LocalSgdArguments | None = None
    sharding: ShardingArguments | None = None
    mesh: MeshArguments | None = None
    param_dtype: str | None = None
    """Dtype in which sharded FP32 parameters are gathered; None gathers FP32."""

    @property
    def shards_parameters(self) -> bool:
        """Say whether FSDP takes the place of DDP."""
        return self.sharding is not None and self.sharding.mode in ("grad_op", "full", "hybrid")

    @property
    def ignores_parameters(self) -> bool:
        """Say whether some parameters are left out of sharding."""
        return self.shards_parameters and self.sharding is not None and self.sharding.ignored is not None

    @property
    def shards_optimizer(self) -> bool:
        """Say whether ZeRO-1 is used together with DDP."""
        return self.sharding is not None and self.sharding.mode == "zero1"


@dataclass(kw_only=True)
class Plan:
    """Requests of one candidate's strategies, in the order in which `assemble` carries them out."""

    knobs: dict[str, Scalar] = field(default_factory=dict)
    """Values of the workload's attributes, by name."""
    environment: list[Callable[[], None]] = field(default_factory=list)
    """Functions that set process-wide settings: threads, back-end flags."""
    model: list[ModelTransform] = field(default_factory=list)
    """Transforms of the model on its device, in its initial precision, such as a change of memory layout."""
    cast: list[ModelTransform] = field(default_factory=list)
    checkpointing: list[ModelTransform] = field(default_factory=list)
    block_compilation: list[ModelTransform] = field(default_factory=list)
    wrap: WrapArguments = field(default_factory=WrapArguments)
    optimizer: OptimizerArguments = field(default_factory=OptimizerArguments)
    step: StepArguments = field(default_factory=StepArguments)
    whole_compilation: list[ModelTransform] = field(default_factory=list)
    batch: list[BatchTransform] = field(default_factory=list)
    """Transforms of every batch, on the device, after the workload's own `batch_transform`."""
    dataset: list[DatasetTransform] = field(default_factory=list)
    batches: BatchArguments = field(default_factory=BatchArguments)
    loader: LoaderArguments = field(default_factory=LoaderArguments)
