"""The records that cross every boundary: rank, server, parent, store, dashboard, export.

Each is frozen, keyword-only and plain data, so it travels as JSON and can be stored and replayed.
Names carry units (`step_time_ns`, `peak_memory_bytes`); shares and bounds are fractions of one.
`SCHEMA_VERSION` changes whenever an older reader would misread a record.

The words (workload, strategy, choice, candidate, trial, study, ...) are those of docs/glossary.md.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, dataclass_transform

import msgspec

SCHEMA_VERSION = 1

Scalar = bool | int | float | str | None
Choice = dict[str, Scalar]
"""One setting of a strategy: its parameters by name. Only what differs from the neutral choice."""

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id() -> str:
    """A sortable opaque id: 48 bits of milliseconds and 80 random bits (the layout of a ULID)."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


@dataclass_transform(frozen_default=True, kw_only_default=True)
class RecordMeta(msgspec.StructMeta):
    """Makes every subclass frozen and keyword-only, which msgspec does not pass on by itself."""

    def __new__(
        mcls: type[RecordMeta], name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> RecordMeta:
        defaults = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        return super().__new__(mcls, name, bases, namespace, **{**defaults, **options})


class Record(msgspec.Struct, metaclass=RecordMeta):
    """Base of all records."""


class Numerics(StrEnum):
    """What a choice does to the numbers of a training step, mildest first.

    `exact`: bit for bit. `sampling`: the same indices and distribution; random augmentation may
    differ. `rounding`: the order of operations, or 16-bit compute with FP32 masters. `lossy`:
    information is dropped. `recipe`: another training recipe. The last two need consent.
    """

    EXACT = "exact"
    SAMPLING = "sampling"
    ROUNDING = "rounding"
    LOSSY = "lossy"
    RECIPE = "recipe"

    @property
    def rank(self) -> int:
        return list(Numerics).index(self)

    @property
    def needs_consent(self) -> bool:
        return self in (Numerics.LOSSY, Numerics.RECIPE)


class SampleUnit(StrEnum):
    """What the throughput counts."""

    SAMPLE = "sample"
    TOKEN = "token"


class Phase(StrEnum):
    """The phases of a trial, in order; each has a deadline."""

    BUILD = "build"
    GUARD = "guard"
    WARM_UP = "warm_up"
    MEASURE = "measure"
    PROFILE = "profile"
    REPORT = "report"


class StepPhase(StrEnum):
    """Which part of the training step computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class FailureKind(StrEnum):
    """Why a trial ended early."""

    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"
    NUMERICS = "numerics"
    TIMEOUT = "timeout"
    CRASH = "crash"
    WORKLOAD_ERROR = "workload_error"
    INFRASTRUCTURE = "infrastructure"


class Purpose(StrEnum):
    """Why a trial was run."""

    BASELINE = "baseline"
    EXPLORE = "explore"
    REPLICATE = "replicate"
    SENTINEL = "sentinel"
    COMPANION = "companion"
    AUDIT = "audit"
    CONFIRM = "confirm"
    MOVED = "moved"
    """Reference or incumbent again, in another place than the figures before."""


class TrialState(StrEnum):
    """Where a trial is in its life. A running one whose process died is lost."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    LOST = "lost"


class StudyState(StrEnum):
    """Where a study is in its life. Completed, cancelled and failed ones have ended."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"


class Verdict(StrEnum):
    """What a recommendation claims."""

    FASTER = "faster"
    NO_SIGNIFICANT_GAIN = "no_significant_gain"
    ENABLES_TRAINING = "enables_training"
    UNCONFIRMED = "unconfirmed"


# --- what is tuned ---------------------------------------------------------------------------


def _label_value(value: Scalar) -> str:
    return (
        {True: "on", False: "off", None: "default"}.get(value, str(value))
        if (value is None or isinstance(value, bool))
        else str(value)
    )


def choice_label(choice: Mapping[str, Scalar]) -> str:
    """`num_workers=2, persistent_workers=on`: a choice as a person reads it."""
    return ", ".join(f"{name}={_label_value(value)}" for name, value in choice.items()) or "unchanged"


class Candidate(Record):
    """The non-neutral choices of a configuration, normalised (see `tuner.strategies.composition`).

    Only strategies, and within them only parameters, that differ from what the user runs today are
    listed. So the hash of a candidate does not change when Steptune learns a new strategy.

    Attributes:
        choices: By strategy: what differs from what the user runs today.
    """

    choices: dict[str, Choice] = {}

    @property
    def key(self) -> str:
        """Stable identity: 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
        canonical = msgspec.json.encode(self.choices, order="deterministic")
        return hashlib.sha256(canonical).hexdigest()[:16]

    @property
    def is_baseline(self) -> bool:
        return not self.choices

    @property
    def label(self) -> str:
        if self.is_baseline:
            return "baseline"
        return "; ".join(f"{name}: {choice_label(choice)}" for name, choice in sorted(self.choices.items()))

    def with_choice(self, strategy: str, choice: Choice) -> Candidate:
        """The candidate with one strategy set to `choice` (an empty choice is the neutral one)."""
        choices = {name: value for name, value in self.choices.items() if name != strategy}
        if choice:
            choices[strategy] = choice
        return Candidate(choices=choices)


BASELINE = Candidate()


class DatasetFacts(Record):
    """What was found out about a dataset.

    Attributes:
        load_deterministic: The same of `load(index)`.
    """

    kind: str
    """"map" or "iterable"."""
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
    """How the parameters of a model fall into units that sharding gathers as one.

    Attributes:
        largest: Elements of the largest unit below the root.
        root: Elements that only the root holds.
    """

    largest: int
    root: int


class ModelFacts(Record):
    """What was found out about a model.

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
    module_types: dict[str, int] = {}
    """How many modules there are of each class name (`Linear`, `LayerNorm`, `Conv2d`, ...)."""
    num_blocks: int = 0
    num_block_kinds: int = 0
    uses_attention: bool = False
    """`scaled_dot_product_attention` was called in one step."""
    has_batch_statistics: bool = False
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
    unaligned_linears: dict[str, int] = {}
    """How many linear layers could be padded to multiples of 8 or 64 ("8", "64")."""
    unaligned_flops: dict[str, float] = {}
    """Their share of `flops_per_step`."""
    num_movable_experts: int = 0
    """Of every mixture, that ranks can share out; 0 where it has none, or does not let them."""
    tensor_units: int = 0
    """Heads or inner columns of its blocks that ranks can share out; 0 where that is not known how."""
    tensor_refusal: str = ""
    """Why it is not."""
    chain_refusal: str = ""
    """Why the repeated blocks cannot be the stages of a pipeline; empty where they can, or where there are none."""
    mask_refusal: str = "its attention was not looked at"
    """Why causal attention by a flag would differ from its masks; empty where it is the same."""
    has_class_token: bool = False
    """It is a vision transformer whose class token can be left out."""
    shard_units: dict[str, UnitFacts] = {}
    """By what `sharding` gathers as one: "root", "block", "size 1000000", …"""


class OptimizerFacts(Record):
    """What was found out about an optimizer.

    Attributes:
        name: Its class.
        module: Where the class is defined.
        state_bytes: What its state takes after one step.
        capturable: A CUDA graph can hold its update.
    """

    name: str
    module: str
    implementation: str
    """What the user's optimizer runs: "default", "for_loop", "foreach", "fused" or "own"."""
    implementations: tuple[str, ...] = ()
    """What its class can run."""
    state_bytes: int = 0
    capturable: bool = False


class WorkloadFacts(Record):
    """What Steptune found out about a workload once, without importing it into the parent.

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
    current: dict[str, Choice] = {}
    """What the user runs today, by strategy: only what differs from PyTorch's defaults."""
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
    """Where batches come from: "shuffled", or the workload's own "sampler" or "batch_sampler"."""
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
    """Of the step that was looked at."""
    look_peak_bytes: int = 0
    """What tensors took on the device at the peak of that step, without an optimizer; 0 on a CPU."""
    prepare_ns: int = 0
    import_ns: int = 0
    model_ns: int = 0


# --- where it runs ---------------------------------------------------------------------------


class Device(Record):
    """A device that trains.

    Attributes:
        name: Of the product.
        memory_bytes: Its memory.
        capability: Of a CUDA device, like "9.0".
    """

    kind: str
    """"cpu" or "cuda"."""
    name: str
    memory_bytes: int
    capability: str | None = None


class HardwareProfile(Record):
    """What figures depend on. Never host names or addresses.

    Attributes:
        devices: Those that a study may use.
        num_cores: Cores of the processor that may be used.
        cpu_name: Of the product.
        memory_bytes: Of the host.
    """

    devices: tuple[Device, ...]
    num_cores: int
    cpu_name: str
    memory_bytes: int
    links: dict[str, str] = {}
    """Kind of link between devices: {"0-1": "NV18"}; empty on one device."""
    versions: dict[str, str] = {}
    """torch, python, and where present cuda, driver, cudnn, nccl."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]

    @property
    def device_kind(self) -> str:
        return self.devices[0].kind

    @property
    def label(self) -> str:
        if self.device_kind == "cpu":
            return f"{self.cpu_name}, {self.num_cores} cores"
        return f"{len(self.devices)} x {self.devices[0].name}"


class Calibration(Record):
    """Measured ceilings of the device, the floors of the bounds."""

    matmul_flops_per_s: dict[str, float] = {}
    """By dtype name ("float32", "bfloat16", ...): the best rate of a square matrix product."""
    copy_bytes_per_s: float = 0.0
    """Bytes read plus bytes written per second of a large copy."""


class CollectiveTiming(Record):
    """One measured point: how long a collective took.

    Attributes:
        collective: "all_reduce", "all_gather" or "reduce_scatter".
        num_ranks: Of the group.
    """

    collective: str
    num_ranks: int
    message_bytes: int
    """The larger of what goes in and what comes out."""
    duration_ns: int
    """Median over repeats of the slowest rank's."""


class Link(Record):
    """What lies between ranks, in the alpha-beta model with a constant part for every call.

    A ring of n ranks takes `call_ns + steps * latency_ns + bytes / bytes_per_s`; see `tuner.network.collective_costs`.

    Attributes:
        kind: Between devices as `nvidia-smi topo -m` names it ("NV18", "PIX", "SYS"), else "shared memory", "loopback",
            "network" or "emulated network".
        latency_ns: Of one step of a ring: alpha.
        call_ns: Of one call, whatever it sends.
        timings: The points that were measured; empty for a link that somebody described.
    """

    kind: str
    latency_ns: float
    bytes_per_s: float
    """One way. Inside a host what one rank sends; between hosts what all ranks of a host send together."""
    call_ns: float = 0.0
    num_sharing: int = 1
    """Groups that ran at the same time over the same link when it was measured: one for each rank of a host."""
    fit_residual: float = 0.0
    """Root mean square of the relative errors of the fit."""
    timings: tuple[CollectiveTiming, ...] = ()


class Topology(Record):
    """Which ranks share a host, and the links inside hosts and between them as they were measured.

    Attributes:
        host_of_rank: Number of the host of each rank, hosts numbered in the order of their first rank.
        inside: None where every host has one rank.
        between: None with one host.
        whole: A flat ring over all ranks, as if it had one kind of link.
        hardware_fingerprint: Of the hardware profile.
        measured_at: ISO 8601, UTC.
    """

    host_of_rank: tuple[int, ...]
    inside: Link | None
    between: Link | None
    whole: Link
    backend: str
    """"nccl" or "gloo"."""
    hardware_fingerprint: str
    measured_at: str

    @property
    def num_ranks(self) -> int:
        return len(self.host_of_rank)

    @property
    def num_hosts(self) -> int:
        return len(set(self.host_of_rank))

    @property
    def ranks_per_host(self) -> int | None:
        """None where hosts have different numbers of ranks."""
        counts = {self.host_of_rank.count(host) for host in self.host_of_rank}
        return counts.pop() if len(counts) == 1 else None


class Environment(Record):
    """What strategies may rely on: the hardware, and the software beside it.

    Attributes:
        hardware: What figures depend on.
        calibration: Its measured ceilings.
        num_ranks: Processes of the training.
        num_hosts: That they are on.
        start_methods: How processes can be started: "fork", "spawn".
        free_disk_bytes: When the study began.
        free_memory_bytes: When the study began.
    """

    hardware: HardwareProfile
    calibration: Calibration = Calibration()
    compiler: str | None = None
    """Path of a C++ compiler that torch.compile can use."""
    num_ranks: int = 1
    num_hosts: int = 1
    topology: Topology | None = None
    """The links between the ranks; None with one rank, and where they were not measured."""
    start_methods: tuple[str, ...] = ("fork",)
    free_disk_bytes: int = 0
    free_memory_bytes: int = 0


# --- one trial -------------------------------------------------------------------------------


class Deadlines(Record):
    """Seconds that each phase may take before the trial counts as hung."""

    build_s: float = 300.0
    guard_s: float = 300.0
    warm_up_s: float = 300.0
    measure_s: float = 120.0
    profile_s: float = 120.0
    report_s: float = 60.0

    def of(self, phase: Phase) -> float:
        return float(getattr(self, f"{phase.value}_s"))


class TrialSpec(Record):
    """All that the trial server and its ranks need to run one process start of one candidate."""

    trial_id: str
    workload: str
    candidate: Candidate
    choices: dict[str, Choice]
    """The complete choice of every strategy, neutral ones included."""
    study_directory: str
    num_ranks: int = 1
    device: str = "cpu"
    seed: int = 0
    guard: bool = True
    lossy: bool = False
    """A choice is lossy or a recipe: the guard judges the loss curve over its longer horizon."""
    unit_roundoff: float = 2.0**-24
    """Of the coarsest arithmetic that a `rounding` choice asks for; selects the tolerance."""
    exact: bool = False
    checks_loader: bool = False
    profile: bool = True
    keep_trace: bool = False
    environment_variables: dict[str, str] = {}
    memory_limit_bytes: int | None = None
    deadlines: Deadlines = Deadlines()
    requested_at_ns: int = 0
    """`time.monotonic_ns()` when the trial was asked for (one clock for all processes of a host)."""


class MeasureSettings(Record):
    """How the windows of a group of trials are taken.

    Attributes:
        min_rounds: Rounds before the measurement may stop.
        max_rounds: Rounds after which it stops.
    """

    window_s: float = 0.2
    """Aimed-at length of one window of the slowest trial of the group."""
    min_rounds: int = 5
    max_rounds: int = 60
    half_width: float = 0.01
    """Stop when the 95 % half-width of every trial's mean rate (or ratio to the first trial of the
    group) is below this share."""
    cap_s: float = 10.0
    """Seconds after which no further round is started."""
    foreign_cpu_share: float = 0.10
    """A window is void when processes outside the group used more than this share of the cores."""


class InputActivity(Record):
    """What those who make batches (worker processes, or the main thread) did during a window.

    Attributes:
        num_workers: Worker processes; 0 where the main thread makes batches.
    """

    num_workers: int
    wait_ns: int
    """Of the main thread, in the loader's `next()`."""
    runnable_share: float
    """Of the makers' time (the main thread: of `wait_ns`): computing or queueing for a core, not sleeping."""
    read_bytes_per_s: float
    """From storage; what the page cache holds costs nothing and is not counted."""


class DeviceReading(Record):
    """What the driver said of a rank's device during a window. None: it does not tell.

    Attributes:
        sm_clock_mhz: When the window ended.
        power_w: Mean over the window, from the energy used; without that counter, when the window ended.
        power_limit_w: What the driver holds the device to.
        temperature_c: When the window ended.
        limits: What held the clock down at either edge, as `trials/device_state.py` names it.
    """

    sm_clock_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    limits: tuple[str, ...] = ()
    slowed_share: float | None = None
    """Of the window: slowed down from heat."""
    foreign_share: float | None = None
    """Of the device's time: used by processes of others."""


class Window(Record):
    """One timed, unprofiled stretch of whole steps.

    Attributes:
        num_steps: Whole steps in it.
        num_samples: Samples in it.
        num_units: Samples or tokens in it, by the workload's unit.
        duration_ns: From its first step's beginning to its last one's end, on the slowest rank.
        step_p20_ns: 20th percentile of the steps' times; as the following, of the rank that has the largest.
        step_p50_ns: Median of the steps' times.
        step_p80_ns: 80th percentile of the steps' times.
        queue_depth_end: The same when it ended.
        input: What those who make batches did; None where it was not watched.
    """

    round: int
    """Windows of one round belong together: the trials of a group took turns in it."""
    position: int
    """Index of the first batch in the study's fixed order of batches (None-like -1: a stream)."""
    num_steps: int
    num_samples: int
    num_units: int
    duration_ns: int
    step_p20_ns: int
    step_p50_ns: int
    step_p80_ns: int
    queue_depth_start: int
    """Batches that the loader held ready or in flight when the window began, and when it ended."""
    queue_depth_end: int
    foreign_cpu_share: float
    """CPU time used by others, as a share of all cores, while the window ran."""
    void: str | None = None
    """Why the window does not count, or None."""
    input: InputActivity | None = None
    device: DeviceReading | None = None
    """Of the first rank's device; None on a CPU, and where nothing could be read."""

    @property
    def units_per_s(self) -> float:
        return self.num_units * 1e9 / self.duration_ns

    @property
    def step_time_ns(self) -> float:
        return self.duration_ns / self.num_steps


class Startup(Record):
    """Where the time went before the first measured window.

    Attributes:
        warm_up_ns: Steps before the first window.
        warm_up_steps: How many there were.
        steady: Their times had settled.
        compile_cold: Nothing compiled for this candidate was cached.
    """

    build_ns: int
    """From the request to a built job, the next field included."""
    user_code_ns: int
    """Of that, inside the user's import, model and dataset code."""
    first_step_ns: int
    """From the request to the beginning of the first warm-up step."""
    warm_up_ns: int
    warm_up_steps: int
    steady: bool
    compile_ns: int = 0
    """Warm-up beyond what the same number of steady steps takes: compilation and capture."""
    compile_cold: bool = False


class MemoryPeak(Record):
    """Peak memory of one rank. On a CPU only `resident_bytes` is not zero.

    Attributes:
        rank: The process.
        allocated_bytes: By tensors, on the device.
        reserved_bytes: By torch's allocator, on the device.
        device_bytes: Of the whole process, on the device.
    """

    rank: int
    resident_bytes: int
    """Of the rank and the processes it started, together."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    device_bytes: int = 0


class CaptureQuality(Record):
    """Whether a profile may be believed; verdicts are withheld where `problems` is not empty."""

    num_events: int
    num_steps: int
    unlinked_share: float = 0.0
    """Device operations without a recorded launch."""
    missing_share: float = 0.0
    """Launches without a device operation."""
    overhead_ratio: float = 1.0
    """Profiled step time over unprofiled step time."""
    problems: tuple[str, ...] = ()
    problem_names: tuple[str, ...] = ()
    """Of `problems`, in their order: which of `profiling.quality.PROBLEMS` each is; empty in older records."""
    notes: tuple[str, ...] = ()
    """What a reader should know, but what changes no verdict."""


class Breakdown(Record):
    """Exclusive categories of a step's time that sum to the step exactly (integer nanoseconds)."""

    rank: int
    device: str
    num_steps: int
    step_time_ns: int
    """The whole profiled stretch; the categories sum to this."""
    categories: dict[str, int]
    quality: CaptureQuality
    unprofiled_step_time_ns: int | None = None
    """Mean step time of the measured windows, per step; what the shares are rescaled to."""
    rescaled: dict[str, int] = {}
    """Per step: host categories shrunk so that the sum is the unprofiled step; empty if unknown."""
    overlapped: dict[str, int] = {}
    """Beside the sum: communication and copies hidden behind compute."""
    blocking: dict[str, int] = {}
    """Of exposed communication: what held compute up that was launched already. Without it the device would have
    waited for the host. Empty where that is not known (a CPU)."""
    steps: tuple[dict[str, int], ...] = ()
    """The categories of each step that are not zero; together they are `categories`."""
    phases: dict[str, int] = {}
    """The compute categories once more, by the part of the step that computes."""
    operators: tuple[str, ...] = ()
    """Names of the operators and kernels with the most time, longest first."""
    copies: tuple[str, ...] = ()
    """Names of the copies in the steps, as the trace has them."""

    def __post_init__(self) -> None:
        assert sum(self.categories.values()) == self.step_time_ns, "categories must sum to the step"

    @property
    def per_step_ns(self) -> dict[str, float]:
        """Nanoseconds per step and category: rescaled to the unprofiled step where known."""
        if self.rescaled:
            return {name: float(value) for name, value in self.rescaled.items()}
        return {name: value / self.num_steps for name, value in self.categories.items()}

    def removable_ns(self, *categories: str) -> float:
        """Nanoseconds per step that are gone when these categories vanish: of communication, what held compute up."""
        times = self.per_step_ns
        held = {name: ns / self.categories[name] for name, ns in self.blocking.items() if self.categories.get(name)}
        return sum(times.get(name, 0.0) * held.get(name, 1.0) for name in categories)

    def removable_share(self, *categories: str) -> float:
        return self.removable_ns(*categories) / max(1.0, sum(self.per_step_ns.values()))

    def share(self, *categories: str) -> float:
        times = self.per_step_ns
        return sum(times.get(name, 0.0) for name in categories) / max(1.0, sum(times.values()))


class KernelStats(Record):
    """All runs of one kernel.

    Attributes:
        name: As the trace has it.
        category: Of the breakdown.
        count: Runs in the profiled steps.
        total_ns: Of all runs.
        mean_ns: Of one run.
        max_ns: Of the longest run.
        tensor_cores: It uses them.
    """

    name: str
    category: str
    count: int
    total_ns: int
    share: float
    """Of the profiled time."""
    mean_ns: int
    max_ns: int
    tensor_cores: bool
    occupancy: float | None = None
    """Estimated, weighted by time, 0 to 1."""


class GapSite(Record):
    """All gaps, or parts of gaps, with one cause that end with one kernel.

    Attributes:
        category: What the gaps are blamed on.
        count: How many there are.
        total_ns: Of all of them.
    """

    category: str
    kernel_after: str
    """Empty for what the end of the steps ends."""
    count: int
    total_ns: int


class CollectiveStats(Record):
    """All calls of one collective with messages of one size, over the ranks that were analysed.

    Attributes:
        name: "allreduce", "allgather", …
        group: The process group.
        group_size: Its ranks.
        dtype: Of the message; empty where the trace does not say.
    """

    name: str
    group: str
    group_size: int
    message_bytes: int
    """The larger of what goes in and what comes out; 0 where the trace does not say."""
    dtype: str
    count: int
    """Per rank."""
    total_ns: int
    """Mean over the ranks that have it, as is `exposed_ns`."""
    exposed_ns: int
    """What no compute hides. Two collectives at the same time count both."""
    latency_ns: int | None = None
    """Median over calls of the shortest over ranks: what is left when nobody waits. None with one rank."""
    skew_ns: int | None = None
    """Median over calls of the latest arrival less the earliest. None with one rank."""
    bus_bytes_per_s: float | None = None
    """Message size times the algorithm's factor, over the latency (with one rank: over the duration)."""


class TrialProfile(Record):
    """Beside the breakdown, of the first rank: the kernels, gaps and collectives with the most time."""

    kernels: tuple[KernelStats, ...] = ()
    gap_sites: tuple[GapSite, ...] = ()
    collectives: tuple[CollectiveStats, ...] = ()


class Finding(Record):
    """One thing that a breakdown shows, with its evidence and what to do about it.

    Attributes:
        rule: Its rule, as docs/diagnosis.md lists them.
        message: What was seen.
        advice: What to do about it.
        strategies: Those that can help.
        evidence: Figures behind it, by name.
    """

    rule: str
    severity: str
    """"note", "warning" or "high"."""
    message: str
    advice: str
    strategies: tuple[str, ...]
    bound: float
    """The most that fixing it could save, as a share of the step."""
    evidence: dict[str, float | str] = {}


class GuardCheck(Record):
    """One comparison with the reference.

    Attributes:
        name: What is compared.
        passed: Within the tolerance.
        observed: The largest difference.
        tolerance: What it may be.
        detail: Where it was; empty where there is nothing to say.
    """

    name: str
    kind: str
    """"pointwise", "curve" or "loader"."""
    passed: bool
    observed: float
    tolerance: float
    detail: str = ""


class GuardVerdict(Record):
    """Whether a candidate still is the same training, as far as `num_steps` steps show.

    Attributes:
        passed: All checks did.
        num_steps: Steps that were compared.
        checks: Each comparison.
        losses: Of the candidate, by step.
        reference_losses: Of the reference, by step.
    """

    passed: bool
    num_steps: int
    checks: tuple[GuardCheck, ...] = ()
    losses: tuple[float, ...] = ()
    reference_losses: tuple[float, ...] = ()
    skipped_steps: int = 0
    """Steps that a loss scaler skipped; they were repeated, so that the curves stay aligned."""

    @property
    def reason(self) -> str:
        failed = [check for check in self.checks if not check.passed]
        if not failed:
            return f"same for {self.num_steps} steps"
        worst = failed[0]
        return worst.detail or f"{worst.name} {worst.observed:.3g} exceeds {worst.tolerance:.3g}"


class Effect(Record):
    """Whether a choice did what it says, seen in the running job.

    Attributes:
        strategy: The strategy.
        took: It did.
        detail: What was seen.
    """

    strategy: str
    took: bool
    detail: str


class Failure(Record):
    """Why and where a trial ended early.

    Attributes:
        kind: For programs.
        phase: In which it happened.
        message: For people.
        rank: The process that failed first.
        signal: That ended it; None where it ended by itself.
        traceback: Of the exception; empty without one.
    """

    kind: FailureKind
    phase: Phase
    message: str
    rank: int = 0
    signal: int | None = None
    traceback: str = ""


class CompilationEvent(Record):
    """Something that happened while the model was compiled, as often as it did.

    Attributes:
        reason: What TorchDynamo or Inductor says.
        place: Function or line; empty where it does not say.
        count: How often.
    """

    reason: str
    place: str
    count: int


class Compilation(Record):
    """What torch.compile did in a trial.

    Attributes:
        num_graphs: Graphs that were compiled.
        num_graph_breaks: Places where a graph had to end and Python went on.
        graph_breaks: The most frequent of them.
        num_recompilations: Compilations because a guard of an earlier one failed.
        recompilations: The most frequent of them, with the guard.
        num_cudagraph_skips: Graphs that were asked to be CUDA graphs, and are not.
        cudagraph_skips: Why.
        seconds: Spent compiling.
        cache_hits: Graphs that were found in the study's cache.
        cache_misses: Graphs that were not.
    """

    num_graphs: int
    num_graph_breaks: int = 0
    graph_breaks: tuple[CompilationEvent, ...] = ()
    num_recompilations: int = 0
    recompilations: tuple[CompilationEvent, ...] = ()
    num_given_up: int = 0
    """Times that a function was compiled so often that it runs as it is from then on."""
    num_cudagraph_skips: int = 0
    cudagraph_skips: tuple[CompilationEvent, ...] = ()
    late_graphs: int = 0
    """Graphs that were compiled after the warm-up, in the midst of what was measured."""
    seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0


class TrialResult(Record):
    """All that one process start of one candidate showed; also what a crash left behind."""

    trial_id: str
    candidate: Candidate
    purpose: Purpose
    group: str
    """Trials of one group lived at the same time and took turns."""
    windows: tuple[Window, ...] = ()
    startup: Startup | None = None
    epoch_restart_ns: int | None = None
    """Cost of starting one epoch: from the last batch of one to the first of the next."""
    steps_per_epoch: int | None = None
    memory: tuple[MemoryPeak, ...] = ()
    breakdowns: tuple[Breakdown, ...] = ()
    profile: TrialProfile | None = None
    findings: tuple[Finding, ...] = ()
    guard: GuardVerdict | None = None
    effects: tuple[Effect, ...] = ()
    compilation: Compilation | None = None
    """None where nothing was compiled."""
    failure: Failure | None = None
    contended: bool = False
    """Fewer clean windows than asked for: others used the machine."""
    unmeasured: tuple[str, ...] = ()
    """Readings of the devices that could not be had, and why: windows are not void for what is not seen."""
    interpreter: str = "forked"
    isolation: str = "none"
    phases_ns: dict[str, int] = {}
    trace_digest: str | None = None
    place: str = ""
    """Which machine and devices of it, without its name; rates of different places are not compared."""

    @property
    def ok(self) -> bool:
        """Measured, and still the same training."""
        return self.failure is None and bool(self.clean_windows) and (self.guard is None or self.guard.passed)

    @property
    def clean_windows(self) -> tuple[Window, ...]:
        return tuple(window for window in self.windows if window.void is None)

    @property
    def duration_ns(self) -> int:
        return sum(self.phases_ns.values())

    @property
    def peak_memory_bytes(self) -> int:
        return max((peak.device_bytes or peak.resident_bytes for peak in self.memory), default=0)


# --- the search ------------------------------------------------------------------------------


class Move(Record):
    """One strategy set to one choice.

    Attributes:
        strategy: The strategy.
        choice: What it is set to.
    """

    strategy: str
    choice: Choice

    @property
    def label(self) -> str:
        return f"{self.strategy}: {choice_label(self.choice)}"


class Suggestion(Record):
    """The next trial (or group of trials) and why."""

    candidate: Candidate
    purpose: Purpose
    stage: str
    reason: str
    moves: tuple[Move, ...] = ()
    bound: float | None = None
    """The most the candidate could save, as a share of the incumbent's step."""
    replicate: int = 0
    """0 for the first start of this candidate for this purpose."""
    companion: Candidate | None = None
    """What it is compared with; run in turns with it where both fit."""


class Decision(Record):
    """One row of the story of a search: what was tried or not, why, and what came of it.

    Attributes:
        sequence: Its place in the search.
        stage: Of the search.
        reason: For people.
        candidate: What was tried, or would have been.
        moves: How it differs from the incumbent.
        trial_ids: The trials behind it.
        predicted_bound: The most it could have gained, as a share of the incumbent's step.
        measured_se: Standard error of `measured_gain`.
    """

    sequence: int
    stage: str
    verdict: str
    """"accepted", "no_gain", "inconclusive", "failed", "contended" (others used the machine),
    "guard_rejected", "no_effect", "measured", "confirmed", "not_confirmed", "not_tried"."""
    reason: str
    candidate: Candidate | None = None
    moves: tuple[Move, ...] = ()
    trial_ids: tuple[str, ...] = ()
    predicted_bound: float | None = None
    measured_gain: float | None = None
    """Rate over the incumbent's rate at that time, less one."""
    measured_se: float | None = None


class Interval(Record):
    """Where a figure lies with some probability.

    Attributes:
        low: Its lower end.
        high: Its upper end.
        level: The probability.
    """

    low: float
    high: float
    level: float = 0.95


class Gain(Record):
    """Rate of the recommendation over the baseline's; 1.0 is no gain.

    Attributes:
        ratio: The estimate.
        num_blocks: Paired comparisons behind it.
        num_finalists: Candidates that were compared at the end.
    """

    ratio: float
    interval: Interval
    """Of the ratio, simultaneous over the finalists."""
    prediction: Interval
    """Where the ratio of one more confirmation of the same size falls with this probability."""
    num_blocks: int
    num_finalists: int


class Part(Record):
    """One accepted change of the recommendation.

    Attributes:
        strategy: The strategy.
        choice: What it is set to.
        interval: Of `gain`; None where there are too few trials.
        bound: The most it was predicted to gain, as a share of the step.
        reason: For people.
        numerics: What it does to the numbers.
    """

    strategy: str
    choice: Choice
    gain: float
    """Own gain as a ratio, from the trials that differ in it."""
    interval: Interval | None
    bound: float | None
    reason: str
    numerics: Numerics


class Certificate(Record):
    """What is known about everything that was not recommended.

    Attributes:
        not_tried: Each with its reason.
        audits: Pruned choices that were tried all the same.
        audit_violations: Those that gained more than their bound.
    """

    remaining_bound: float
    """The most that any untried, legal choice could still gain, as a share of the step."""
    status: str
    """"estimated" until enough pruned choices were audited, then "audited"."""
    noise: float
    """Smallest gain that this study could tell from none."""
    ended: str
    """"no bound above noise", "budget spent", "all choices tried", "interrupted"."""
    not_tried: tuple[Decision, ...] = ()
    audits: int = 0
    audit_violations: int = 0


class Alternative(Record):
    """Another candidate that was measured.

    Attributes:
        candidate: What it changes.
        gain: Rate over the baseline's.
        peak_memory_bytes: Of its hungriest rank.
        numerics: What it does to the numbers.
        guard: What the guard said.
    """

    candidate: Candidate
    gain: float
    peak_memory_bytes: int
    numerics: Numerics
    guard: str


class Cost(Record):
    """What finding the recommendation took.

    Attributes:
        tuning_s: All of the study.
        num_trials: Trials that were run.
        compile_s: What the recommendation compiles before it is fast.
        payback_tuning_steps: Steps after which the study has paid for itself.
    """

    tuning_s: float
    num_trials: int
    compile_s: float = 0.0
    payback_steps: float | None = None
    """Steps after which the recommendation's compilation has paid for itself."""
    payback_tuning_steps: float | None = None


class Recommendation(Record):
    """The answer of a study.

    Attributes:
        study_id: The study.
        created_at: ISO 8601, UTC.
        workload: The reference that the user gave.
        workload_signature: Of similar workloads.
        global_batch: Samples of one step.
        sample_unit: What the throughput counts.
        verdict: What is claimed.
        candidate: What to change.
        choices: The complete choice of every strategy.
        environment_variables: To be set before torch is imported.
        hardware: On which it was measured.
        baseline_units_per_s: Of today's settings.
        units_per_s: Of the recommendation.
        gain: With its intervals; None where the baseline has no rate.
        parts: Each accepted change.
        shares_before: Of the step by category, with today's settings.
        shares_after: The same with the recommendation.
        bottleneck_before: What took the most time.
        bottleneck_after: What takes the most time now.
        guard: Whether it is the same training.
        certificate: About what was not recommended.
        cost: Of finding it.
        num_ranks: Processes of the training.
        alternatives: Other good candidates.
        peak_memory_bytes: Of the hungriest rank.
        baseline_peak_memory_bytes: The same with today's settings.
        schema_version: Of this record.
        steptune_version: That made it.
    """

    study_id: str
    created_at: str
    workload: str
    workload_signature: str
    global_batch: int
    sample_unit: SampleUnit
    verdict: Verdict
    candidate: Candidate
    choices: dict[str, Choice]
    environment_variables: dict[str, str]
    hardware: HardwareProfile
    baseline_units_per_s: float
    units_per_s: float
    gain: Gain | None
    parts: tuple[Part, ...]
    shares_before: dict[str, float]
    shares_after: dict[str, float]
    bottleneck_before: str
    bottleneck_after: str
    guard: GuardVerdict | None
    certificate: Certificate
    cost: Cost
    num_ranks: int = 1
    alternatives: tuple[Alternative, ...] = ()
    peak_memory_bytes: int = 0
    baseline_peak_memory_bytes: int = 0
    foreign_cpu_share: float = 0.0
    """Median share of the cores that other programs used while the baseline was measured."""
    schema_version: int = SCHEMA_VERSION
    steptune_version: str = ""


class StudySettings(Record):
    """What the user asked of a study.

    Attributes:
        budget_s: Seconds that the search may take.
        max_trials: Most trials; None for as many as the budget allows.
        allow: Numerics that need consent and have it.
        only: Strategies to try; empty for all.
        skip: Strategies not to try.
        seed: Of the search, the samples and the initial state.
        measure: How windows are taken.
        num_ranks: Processes of the training.
        device: "cpu" or "cuda"; None for CUDA where there is one.
        memory_limit_bytes: Most memory of a trial.
        remeasure_links: Whether links between ranks are measured that an earlier study has measured.
        confirm_blocks: Paired comparisons of each finalist with the baseline; two at least where time is short.
        num_finalists: Candidates that are compared at the end.
    """

    budget_s: float = 300.0
    max_trials: int | None = None
    allow: tuple[Numerics, ...] = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    seed: int = 0
    measure: MeasureSettings = MeasureSettings()
    num_ranks: int = 1
    device: str | None = None
    memory_limit_bytes: int | None = None
    remeasure_links: bool = False
    confirm_blocks: int = 5
    num_finalists: int = 2
    phase_timeout_s: float | None = None
    """Seconds that any phase of a trial may take; None allows multiples of what the baseline took."""


class Study(Record):
    """The search for one workload on one hardware profile under one budget."""

    study_id: str
    workload: str
    settings: StudySettings
    created_at: str
    directory: str
    state: StudyState = StudyState.RUNNING
    facts: WorkloadFacts | None = None
    environment: Environment | None = None
    message: str = ""
    source_digest: str = ""
    """Of the workload's own file, so that results of an edited workload are not mixed."""
    steptune_version: str = ""


class Trial(Record):
    """One row of a study: a process start that was asked for, and its result once complete."""

    trial_id: str
    study_id: str
    sequence: int
    candidate: Candidate
    purpose: Purpose
    group: str
    replicate: int
    state: TrialState
    started_at: str
    attempts: int = 1
    result: TrialResult | None = None


class Artifact(Record):
    """A file that belongs to a study, known by its content."""

    study_id: str
    trial_id: str | None
    """None for a file of the whole study."""
    kind: str
    digest: str
    """SHA-256 of the content, in hexadecimal digits."""
    size_bytes: int
    created_at: str


class Event(Record):
    """Something that happened; append-only, in order.

    Attributes:
        sequence: Its number: it grows over all studies.
        study_id: The study.
        at: ISO 8601, UTC.
        kind: "state", "trials_ended", "recommended", …
        data: More, by kind.
    """

    sequence: int
    study_id: str
    at: str
    kind: str
    data: dict[str, Any] = {}
