"""Facts about a workload: its data, model and optimizer."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from steptune.tuner.records.base import Record
from steptune.tuner.records.choices import Choice, Scalar


class SampleUnit(StrEnum):
    """Unit that the throughput counts."""

    SAMPLE = "sample"
    TOKEN = "token"
    STEP = "step"
    """Unit of a script whose batches Steptune cannot count."""


class DatasetFacts(Record):
    """Facts about a dataset.

    Attributes:
        load_deterministic: `load(index)` gave the same sample under both states.
    """

    kind: str
    """"map" or "iterable"; "none" where a script makes its batches without a loader."""
    length: int | None
    """Samples, or None where an iterable dataset has no length."""
    sample_bytes: int | None
    """Mean bytes of one sample over the samples that were looked at."""
    sample_ns: int | None
    """Mean time of one `dataset[index]` in the calling process."""
    deterministic: bool
    """`dataset[i]` gave the same sample under two states of the random generators."""
    splits: bool
    """The dataset has `load(index)` (deterministic) and `augment(sample)`."""
    load_deterministic: bool = False
    seedable: bool = True
    """`dataset[i]` repeats itself when torch's, NumPy's and Python's generators are seeded."""
    padding_share: float | None = None
    """Padding's share of the batches, each padded to its longest sample; None where lengths are not known."""


class UnitFacts(Record):
    """Units of a model's parameters that sharding gathers as one.

    Attributes:
        largest: Elements of the largest unit below the root.
        root: Elements that only the root holds.
    """

    largest: int
    root: int


class ModelFacts(Record):
    """Facts about a model.

    Attributes:
        num_parameters: Elements of all parameters.
        parameter_bytes: What they take.
        num_parameter_tensors: How many tensors they are.
        num_blocks: Repeated blocks; 0 where there are none.
        num_block_kinds: How many of them differ in parameters' shapes or plain attributes: each is compiled by itself.
        has_batch_statistics: It has layers that normalise over the batch.
        expert_implementations: Ways in which its experts can run: "looped", "batched", "grouped".
        expert_implementation: That in use; None where there are no experts.
    """

    num_parameters: int
    parameter_bytes: int
    num_parameter_tensors: int
    module_types: dict[str, int] = field(default_factory=dict)
    """Number of modules of each class name (`Linear`, `LayerNorm`, `Conv2d`, ...)."""
    num_blocks: int = 0
    num_block_kinds: int = 0
    uses_attention: bool = False
    """`scaled_dot_product_attention` was called in one step."""
    has_batch_statistics: bool = False
    block_state: str = ""
    """A buffer that its repeated blocks change in their forward pass, running statistics of torch's norms apart."""
    num_frozen: int = 0
    """Elements of parameters that are not trained."""
    num_unused_parameters: int = 0
    """Tensors that require a gradient and got none from the first batch."""
    expert_implementations: tuple[str, ...] = ()
    expert_implementation: str | None = None
    can_be_batch_second: bool = False
    """The repeated blocks are attention of torch whose batch may come second (`training/batch_second.py`)."""
    flops_per_step: int | None = None
    """Counted by torch's FlopCounterMode over one forward and backward of the global batch."""
    unaligned_linears: dict[str, int] = field(default_factory=dict)
    """Number of linear layers that could be padded to multiples of 8 or 64 ("8", "64")."""
    unaligned_flops: dict[str, float] = field(default_factory=dict)
    """Share of `flops_per_step` of the layers in `unaligned_linears`."""
    num_movable_experts: int = 0
    """Experts of every mixture that ranks can share out; 0 where it has none, or does not let them."""
    tensor_units: int = 0
    """Heads or inner columns of its blocks that ranks can share out; 0 where that is not known how."""
    tensor_refusal: str = ""
    """Reason why it is not."""
    chain_refusal: str = ""
    """Reason why the repeated blocks cannot be pipeline stages; empty where they can, or where there are none."""
    mask_refusal: str = "its attention was not looked at"
    """Reason why causal attention by a flag would differ from its masks; empty where it is the same."""
    kernel_refusals: dict[str, str] = field(default_factory=dict)
    """Reason why a fused kernel cannot compute a part of it, by the kernel's name; empty where it can."""
    has_class_token: bool = False
    """It is a vision transformer whose class token can be left out."""
    shard_units: dict[str, UnitFacts] = field(default_factory=dict)
    """Units by what `sharding` gathers as one: "root", "block", "size 1000000", …"""

    @property
    def num_trained(self) -> int:
        """Elements of parameters that are trained."""
        return self.num_parameters - self.num_frozen


class OptimizerFacts(Record):
    """Facts about an optimizer.

    Attributes:
        name: Its class.
        module: Where the class is defined.
        state_bytes: What its state takes after one step.
        capturable: A CUDA graph can hold its update.
    """

    name: str
    module: str
    implementation: str
    """Implementation that the user's optimizer runs: "default", "for_loop", "foreach", "fused" or "own"."""
    implementations: tuple[str, ...] = ()
    """Implementations that the optimizer's class can run."""
    state_bytes: int = 0
    capturable: bool = False


class KnobFacts(Record):
    """An attribute of a workload that may be set to other values.

    Attributes:
        name: The attribute.
        today: Its value as the user runs it.
        values: Others to try, the first first.
        ordered: They are numbers of which neighbours behave alike.
        recipe: Other values are another training recipe, tried with consent only.
    """

    name: str
    today: Scalar
    values: tuple[Scalar, ...]
    ordered: bool = False
    recipe: bool = False


class ScriptFacts(Record):
    """Findings of an inspection in a training script that nobody rewrites.

    Attributes:
        command: As the user types it.
        folder: In which it runs.
        device: "cpu" or "cuda".
        loader: Class of the loader whose batches train; None where the loop makes its batches itself.
        loader_number: Of the loader, in the order of creation; None without one.
        optimizers: Classes of those that make a step, in order; empty where parameters are updated by hand.
        optimizer_numbers: Of these, in the order of creation.
        models: Classes of the outermost modules that are called with gradients.
        places: Lines of the user's code at which "loader" and "optimizer" were made, a "model" is called, and a "step"
            ends.
        autocast: Dtype of the script's own autocast; empty without one.
        compiled: The script compiles a model itself.
        wrappers: DistributedDataParallel and its like.
        deterministic: The script sets `torch.backends.cudnn.deterministic`.
        sparse: A layer makes sparse gradients.
        device_name: As torch names it; of a CPU its number of cores.
        files: Digests of the files that the command or `places` name, by their path below the folder. Blank lines and
            those that call Steptune do not count (`scripts/agent/sources.py`).
        lines: Of `places` in these files: file, and position among the lines that count, from 0.
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
    """Facts that Steptune found out about a workload once, without importing it into the parent.

    Attributes:
        reference: How the user named it.
        name: Its class.
        global_batch: Samples of one step, over all ranks.
        sample_unit: What the throughput counts.
        dataset: Its data.
        model: Its model.
        optimizer: Its optimizer.
        steps_per_epoch: None where the dataset has no length.
        batch_bytes: Of the first batch.
        batch_splittable: A batch can be cut into micro-batches.
        varying_shapes: Batches differ in shape.
        units_per_batch: Mean samples or tokens of a batch.
        custom_step: The workload has a training step of its own.
        host_read: The first operator of a step for whose result the host waits, with its line; empty without one.
        host_read_beside_masks: The first such one that computes no attention mask.
        sample_loss: Of the first batch.
        prepare_ns: What its `prepare` took.
        import_ns: What importing it took.
        model_ns: What making its model took.
        fork_spares_ns: Time by which a trial of a script is shorter that goes on from a frozen copy of its process.
    """

    reference: str
    name: str
    signature: str
    """Hash of what makes workloads similar: classes, sizes and batch; used to reuse past results."""
    global_batch: int
    sample_unit: SampleUnit
    dataset: DatasetFacts
    model: ModelFacts
    optimizer: OptimizerFacts
    current: dict[str, Choice] = field(default_factory=dict)
    """Choices that the user runs today, by strategy: only what differs from PyTorch's defaults."""
    steps_per_epoch: int | None = None
    batch_bytes: int = 0
    batch_splittable: bool = True
    varying_shapes: bool = False
    units_per_batch: float = 0.0
    randomness: str = "none"
    """"none"; "switchable" (dropout that evaluation mode turns off); "always"."""
    max_global_batch: int | None = None
    """Most samples of a step that the user would train with; None allows no more than today's."""
    sampling: str = "shuffled"
    """Source of the batches: "shuffled", or the workload's own "sampler" or "batch_sampler"."""
    custom_step: bool = False
    host_read: str = ""
    host_read_beside_masks: str = ""
    byte_form: bool = False
    """It has `byte_dataset` and `from_bytes`."""
    sample_loss: float = 0.0
    sample_step_ns: int = 0
    """Forward and backward of the first batch, when the workload was looked at."""
    fits_memory: bool = True
    """False where one whole batch ran out of memory and a part of it was looked at."""
    look_samples: float = 0.0
    """Samples of the step that was looked at."""
    look_peak_bytes: int = 0
    """Bytes that tensors took on the device at the peak of that step, without an optimizer; 0 on a CPU."""
    knobs: tuple[KnobFacts, ...] = ()
    """The workload's own, which are searched with the strategies."""
    prepare_ns: int = 0
    import_ns: int = 0
    model_ns: int = 0
    fork_spares_ns: int = 0
    script: ScriptFacts | None = None
    """None of a `Workload`."""
