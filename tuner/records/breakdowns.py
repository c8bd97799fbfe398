"""Breakdown of a profiled step, the quality of the capture, and the findings."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from steptune.tuner.records.base import Record


class StepPhase(StrEnum):
    """Phase of the training step that computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class CaptureQuality(Record):
    """Trust in a profile; verdicts are withheld where `problems` is not empty."""

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
    """Names in `profiling.quality.PROBLEMS` of the `problems`, in their order; empty in older records."""
    notes: tuple[str, ...] = ()
    """Remarks that a reader should know and that change no verdict."""


class StepFacts(Record):
    """Settings that a profiled step already uses, as far as its trace or its configuration says.

    Advice is conditioned on them: nothing is recommended that is already on. An empty string or None means unknown.

    Attributes:
        compiled: Whether torch.compile produced any of what runs.
        cuda_graphs: Whether any launch replays a CUDA graph.
        optimizer: Implementation: "fused" (compiled updates included), "foreach" or "for_loop".
        optimizer_name: Class of the optimizer, like "AdamW".
        loader: "workers" or "main process".
        num_workers: Worker processes of the loader.
        pinned_memory: Whether batches are copied from pinned memory.
        prefetched: Whether batches are copied on another stream than the one that computes.
        matmul_dtype: Arithmetic of most of the matmul time: "float32", "tf32", "bfloat16", "float16" or "float8".
        faster_dtypes: Arithmetics in which this device multiplies faster than in FP32, the easiest to use first.
        channels_last: Whether convolutions run without conversions between NCHW and NHWC.
        layout_ns: Nanoseconds a step that convert between NCHW and NHWC.
        checkpointed: Whether activation checkpointing recomputes some of the forward pass.
        own_capture: Whether Steptune recorded the profile itself.
    """

    compiled: bool = False
    cuda_graphs: bool = False
    optimizer: str = ""
    optimizer_name: str = ""
    loader: str = ""
    num_workers: int | None = None
    pinned_memory: bool | None = None
    prefetched: bool = False
    matmul_dtype: str = ""
    faster_dtypes: tuple[str, ...] | None = None
    channels_last: bool | None = None
    layout_ns: float = 0.0
    checkpointed: bool = False
    own_capture: bool = False


class Stall(Record):
    """A stretch in which the host launched nothing (on a CPU: ran no operator) for unusually long.

    Attributes:
        step: Number of the step, from 1.
        length_ns: From one launch to the next.
        idle_ns: Part of it in which the device did nothing for that reason.
        name: Shortest recorded event that covers most of it; empty where nothing was recorded.
    """

    step: int
    length_ns: int
    idle_ns: int
    name: str = ""


class Stalls(Record):
    """The stalls of all profiled steps: host time that is no dispatch of operators.

    Attributes:
        limit_ns: Length from which a stretch without a launch is a stall.
        idle_ns: Time of the category `host` inside stalls.
        steps: Numbers of the steps that have one, from 1.
        longest: The longest of them, the longest first.
    """

    limit_ns: int
    idle_ns: int = 0
    steps: tuple[int, ...] = ()
    longest: tuple[Stall, ...] = ()


class Replay(Record):
    """The recorded steps, simulated on their graph of dependencies: as they are, and without one cause at a time.

    Attributes:
        recorded_ns: Time of a recorded step.
        step_time_ns: The same simulated, without the profiler's cost where the unprofiled step is known.
        error: Of a replay of the unchanged steps with the usual delay of every edge, as a share of the recorded step.
        event_cost_ns: What the profiler cost for every event; None where the unprofiled step is not known.
        host_slowdown: How many times as long the rest of the host's work took beside that; None like the cost.
        unprofiled_error: Of the replay without the profiler's cost, as a share of the unprofiled step.
        saved: By cause: the share of the step that is saved without it.
        uncertain: By cause: by how much that depends on the profiler's cost, as far as the unprofiled step leaves it
            open.
        together: By causes, joined with "+": the share that is saved without all of them.
        refusal: Why the steps cannot be replayed; empty where they can.
    """

    recorded_ns: int
    step_time_ns: int | None = None
    error: float | None = None
    event_cost_ns: int | None = None
    host_slowdown: float | None = None
    unprofiled_error: float | None = None
    saved: dict[str, float] = field(default_factory=dict)
    uncertain: dict[str, float] = field(default_factory=dict)
    refusal: str = ""
    together: dict[str, float] = field(default_factory=dict)


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
    rescaled: dict[str, int] = field(default_factory=dict)
    """Times per step, host categories shrunk so that the sum is the unprofiled step; empty if unknown."""
    overlapped: dict[str, int] = field(default_factory=dict)
    """Communication and copies hidden behind compute, beside the sum."""
    blocking: dict[str, int] = field(default_factory=dict)
    """Exposed communication that held up compute that was launched already. Without it the device would have waited
    for the host. Empty where that is not known (a CPU)."""
    steps: tuple[dict[str, int], ...] = ()
    """The categories of each step that are not zero; together they are `categories`."""
    phases: dict[str, int] = field(default_factory=dict)
    """The compute categories once more, by the part of the step that computes."""
    operators: tuple[str, ...] = ()
    """Names of the operators and kernels with the most time, longest first."""
    copies: tuple[str, ...] = ()
    """Names of the copies in the steps, as the trace has them."""
    facts: StepFacts = StepFacts()
    """Facts about what the steps already use; nothing is known of it in older records."""
    stalls: Stalls | None = None
    """Stretches without a launch; None in older records."""
    replay: Replay | None = None
    """The process's steps, simulated with and without a cause; None where no device worked, and in older records."""
    step_flops: float | None = None
    """FLOP of the process's matmuls, convolutions and attention in a step, forward and backward, without recomputation;
    None where they are not known."""
    mfu: float | None = None
    """Model FLOPs utilisation: those FLOP at the peak of its devices, over the step; None where either is unknown."""

    def __post_init__(self) -> None:
        assert sum(self.categories.values()) == self.step_time_ns, "categories must sum to the step"

    @property
    def per_step_ns(self) -> dict[str, float]:
        """Nanoseconds per step and category: rescaled to the unprofiled step where known."""
        if self.rescaled:
            return {name: float(value) for name, value in self.rescaled.items()}
        return {name: value / self.num_steps for name, value in self.categories.items()}

    @property
    def stalled_share(self) -> float:
        """Part of the category `host` that lies in stalls.

        The profiler makes dispatch longer, not stalls: of a rescaled step they keep their length, as far as that fits.
        """
        host_ns = self.per_step_ns.get("host", 0.0)
        if self.stalls is None or not self.stalls.idle_ns or not host_ns:
            return 0.0
        profiled_ns = self.categories["host"] / self.num_steps
        stalled_ns = self.stalls.idle_ns / self.num_steps * max(1.0, host_ns / profiled_ns)
        return min(1.0, stalled_ns / host_ns)

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
    evidence: dict[str, float | str] = field(default_factory=dict)
    claim: float | None = None
    """Share of the step that it claims: what fixing it saves beside the findings before it, at most where that was not
    replayed. Each share of a step is claimed once, so that claims add up. None where it saves nothing by itself, and
    in older records."""
