"""Facts about a workload: its data, model and optimizer."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from steptune.tuner.records.base import Record
from steptune.tuner.records.choices import Choice, Scalar


class SampleUnit(StrEnum):
    """Unit in which the throughput is counted."""

    SAMPLE = "sample"
    TOKEN = "token"
    STEP = "step"
    """Unit for a script whose samples Steptune cannot count."""


class DatasetFacts(Record):
    """Facts about a dataset.

    Attributes:
        load_deterministic: Whether `load(index)` gave the same sample under two states of the random generators.
    """

    kind: str
    """Kind of dataset: "map", "iterable", or "none" where a script makes its batches without a loader."""
    length: int | None
    """Number of samples; None for an iterable dataset without a length."""
    sample_bytes: int | None
    """Mean bytes of a sample, over the samples that were inspected."""
    sample_ns: int | None
    """Mean time of one `dataset[index]` in the calling process."""
    deterministic: bool
    """True if `dataset[i]` gave the same sample under two states of the random generators."""
    splits: bool
    """True if the dataset has `load(index)` (deterministic) and `augment(sample)`."""
    load_deterministic: bool = False
    seedable: bool = True
    """True if `dataset[i]` is reproducible when torch's, NumPy's and Python's generators are seeded."""
    padding_share: float | None = None
    """Share of padding in the batches if each batch is padded to its longest sample; None where lengths are unknown."""


class UnitFacts(Record):
    """Parameter counts of the units that sharding gathers.

    Attributes:
        largest: Number of parameters in the largest unit below the root.
        root: Number of parameters that only the root holds.
    """

    largest: int
    root: int


class ModelFacts(Record):
    """Facts about a model.

    Attributes:
        num_parameters: Number of elements in all parameters.
        parameter_bytes: Bytes of all parameters.
        num_parameter_tensors: Number of parameter tensors.
        num_blocks: Number of repeated blocks; 0 where there are none.
        num_block_kinds: Number of blocks that differ in their parameters' shapes or plain attributes; each is compiled
            separately.
        has_batch_statistics: Whether some layers normalise over the batch.
        expert_implementations: Ways in which its experts can run: "looped", "batched", "grouped".
        expert_implementation: The implementation in use; None where there are no experts.
    """

    num_parameters: int
    parameter_bytes: int
    num_parameter_tensors: int
    module_types: dict[str, int] = field(default_factory=dict)
    """Number of modules of each class name (`Linear`, `LayerNorm`, `Conv2d`, ...)."""
    num_blocks: int = 0
    num_block_kinds: int = 0
    uses_attention: bool = False
    """True if `scaled_dot_product_attention` was called in one step."""
    has_batch_statistics: bool = False
    block_state: str = ""
    """Name of a buffer, other than running statistics of torch's norms, that the repeated blocks change in their
    forward pass.
    """
    num_frozen: int = 0
    """Number of elements in parameters that are not trained."""
    num_unused_parameters: int = 0
    """Number of parameter tensors that require a gradient but got none from the first batch."""
    expert_implementations: tuple[str, ...] = ()
    expert_implementation: str | None = None
    can_be_batch_second: bool = False
    """True if the repeated blocks use torch's attention and accept the batch as the second dimension
    (`training/batch_second.py`).
    """
    flops_per_step: int | None = None
    """FLOP of one forward and backward pass over the global batch, counted by torch's FlopCounterMode."""
    unaligned_linears: dict[str, int] = field(default_factory=dict)
    """Number of linear layers whose sizes could be padded to multiples of 8 or 64, by that number ("8", "64")."""
    unaligned_flops: dict[str, float] = field(default_factory=dict)
    """Share of `flops_per_step` in the layers that `unaligned_linears` counts."""
    num_movable_experts: int = 0
    """Number that the degree of expert parallelism must divide: the greatest common divisor of the layers' numbers of
    experts. 0 if no layer's experts can be moved to other ranks.
    """
    tensor_units: int = 0
    """Number of the blocks' heads or inner columns that can be divided among ranks; 0 where no way to divide them is
    known.
    """
    tensor_refusal: str = ""
    """Reason why `tensor_units` is 0; empty otherwise."""
    chain_refusal: str = ""
    """Reason why the repeated blocks cannot be pipeline stages; empty where they can, or where there are none."""
    mask_refusal: str = "its attention was not inspected"
    """Reason why the causal flag of attention would give another result than the model's masks; empty if the result is
    the same."""
    kernel_refusals: dict[str, str] = field(default_factory=dict)
    """Reason why a fused kernel cannot compute part of the model, by the kernel's name; empty where it can."""
    has_class_token: bool = False
    """True if the model is a vision transformer whose class token can be left out."""
    shard_units: dict[str, UnitFacts] = field(default_factory=dict)
    """Units that `sharding` gathers, by its setting: "root", "block", "size 1000000", …"""

    @property
    def num_trained(self) -> int:
        """Number of elements in parameters that are trained."""
        return self.num_parameters - self.num_frozen


class OptimizerFacts(Record):
    """Facts about an optimizer.

    Attributes:
        name: Name of its class.
        module: Module in which the class is defined.
        state_bytes: Bytes of its state after one step.
        capturable: Whether a CUDA graph can hold its update.
    """

    name: str
    module: str
    implementation: str
    """Implementation of the user's optimizer: "default", "for_loop", "foreach", "fused" or "own"."""
    implementations: tuple[str, ...] = ()
    """Implementations that the optimizer's class supports."""
    state_bytes: int = 0
    capturable: bool = False


class KnobFacts(Record):
    """An attribute of a workload that may be set to other values.

    Attributes:
        name: Name of the attribute.
        today: The value that the user runs today.
        values: Other values to try, in the order in which they are tried.
        ordered: Whether the values are numbers whose neighbours behave alike.
        recipe: Whether other values change the training recipe and are tried with consent only.
    """

    name: str
    today: Scalar
    values: tuple[Scalar, ...]
    ordered: bool = False
    recipe: bool = False


class ScriptFacts(Record):
    """Findings of an inspection of a training script that runs unmodified.

    Attributes:
        command: Command as the user types it.
        folder: Folder in which it runs.
        device: "cpu" or "cuda".
        loader: Class of the loader whose batches train; None where the loop makes its batches itself.
        loader_number: Number of the loader, in the order of creation; None without one.
        optimizers: Classes of the optimizers that make a step, in order; empty where parameters are updated by hand.
        optimizer_numbers: Numbers of these optimizers, in the order of creation.
        models: Classes of the outermost modules that are called with gradients.
        places: Lines of the user's code at which "loader" and "optimizer" were made, a "model" is called, and a "step"
            ends.
        autocast: Dtype of the script's own autocast; empty without one.
        compiled: Whether the script compiles a model itself.
        wrappers: Names of the wrappers, such as DistributedDataParallel.
        deterministic: Whether the script sets `torch.backends.cudnn.deterministic`.
        sparse: Whether a layer makes sparse gradients.
        device_name: Name of the device in torch; for a CPU, its number of cores.
        files: Digests of the files that the command or `places` name, by their path below the folder. Blank lines and
            those that call Steptune do not count (`scripts/agent/sources.py`).
        lines: Positions of `places` in these files: the file, and the line's number among those that count, from 0.
    """

    command: tuple[str, ...]
    folder: str
    device: str = "cpu"
    loader: str | None = None
    loader_number: int | None = None
    optimizers: tuple[str, ...] = ()
    optimizer_numbers: tuple[int, ...] = ()
    models: tuple[str, ...] = ()
    places: dict[str, str] = field(default_factory=dict)
    autocast: str = ""
    compiled: bool = False
    wrappers: tuple[str, ...] = ()
    deterministic: bool = False
    sparse: bool = False
    device_name: str = ""
    files: dict[str, str] = field(default_factory=dict)
    lines: dict[str, tuple[str, int]] = field(default_factory=dict)


class WorkloadFacts(Record):
    """Facts about a workload, determined once, without importing it into the parent process.

    Attributes:
        reference: Reference as the user wrote it.
        name: Name of its class.
        global_batch: Samples of one step, over all ranks.
        sample_unit: Unit of the throughput.
        dataset: Facts about its data.
        model: Facts about its model.
        optimizer: Facts about its optimizer.
        steps_per_epoch: Number of steps in an epoch; None where the dataset has no length.
        batch_bytes: Bytes of the first batch.
        batch_splittable: Whether a batch can be cut into micro-batches.
        varying_shapes: Whether batches differ in shape.
        units_per_batch: Mean samples or tokens of a batch.
        custom_step: Whether the workload has a training step of its own.
        host_read: The first operator of a step for whose result the host waits, with its line; empty without one.
        host_read_beside_masks: The first such operator that computes no attention mask; empty without one.
        host_read_in_loss: The first such operator that the loss runs outside of the model's forward pass; empty without
            one.
        sample_loss: Loss of the first batch.
        prepare_ns: Time of its `prepare`.
        import_ns: Time of importing it.
        model_ns: Time of making its model.
        fork_spares_ns: Time that a trial of a script saves by starting from a frozen copy of its process.
    """

    reference: str
    name: str
    signature: str
    """Hash of the classes, sizes and batch, used to find similar workloads with results to reuse."""
    global_batch: int
    sample_unit: SampleUnit
    dataset: DatasetFacts
    model: ModelFacts
    optimizer: OptimizerFacts
    current: dict[str, Choice] = field(default_factory=dict)
    """Choices that the user runs today, by strategy; only those that differ from PyTorch's defaults."""
    steps_per_epoch: int | None = None
    batch_bytes: int = 0
    batch_splittable: bool = True
    varying_shapes: bool = False
    units_per_batch: float = 0.0
    randomness: str = "none"
    """Use of random numbers in the step: "none", "switchable" (dropout that evaluation mode turns off) or "always"."""
    max_global_batch: int | None = None
    """Maximum number of samples per step that the user accepts; None for no more than today's."""
    sampling: str = "shuffled"
    """Source of the batches: "shuffled", or the workload's own "sampler" or "batch_sampler"."""
    custom_step: bool = False
    host_read: str = ""
    host_read_beside_masks: str = ""
    host_read_in_loss: str = ""
    byte_form: bool = False
    """True if the workload has `byte_dataset` and `from_bytes`."""
    sample_loss: float = 0.0
    sample_step_ns: int = 0
    """Time of the forward and backward pass of the first batch during the inspection."""
    fits_memory: bool = True
    """True if one whole batch fits into memory; if not, only a part of it was inspected."""
    look_samples: float = 0.0
    """Number of samples in the step that was inspected."""
    look_peak_bytes: int = 0
    """Peak memory of tensors on the device during the inspected step, without an optimizer; 0 on a CPU."""
    knobs: tuple[KnobFacts, ...] = ()
    """Knobs of the workload, which are searched together with the strategies."""
    prepare_ns: int = 0
    import_ns: int = 0
    model_ns: int = 0
    fork_spares_ns: int = 0
    script: ScriptFacts | None = None
    """Findings of the inspection of a script; None for a `Workload`."""
