"""Breakdown of a profiled step, the quality of the capture, and the findings."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from steptune.tuner.records.base import Record


class StepPhase(StrEnum):
    """Phase of the training step to which compute belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class CaptureQuality(Record):
    """Quality of a profile's capture. No findings are drawn from a profile whose `problems` is not empty."""

    num_events: int
    num_steps: int
    unlinked_share: float = 0.0
    """Share of device operations without a recorded launch."""
    missing_share: float = 0.0
    """Share of launches without a recorded device operation."""
    overhead_ratio: float = 1.0
    """Profiled step time divided by unprofiled step time."""
    problems: tuple[str, ...] = ()
    problem_names: tuple[str, ...] = ()
    """Names of the `problems` in `profiling.quality.PROBLEMS`, in the same order; empty in older records."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader that do not change the verdict on the capture."""


class StepFacts(Record):
    """Settings that a profiled step already uses, as far as its trace or its configuration shows them.

    Advice is conditioned on them: nothing is recommended that is already on. An empty string or None means unknown.

    Attributes:
        compiled: Whether torch.compile produced any of what runs.
        cuda_graphs: Whether any launch replays a CUDA graph.
        optimizer: Implementation: "fused" (compiled updates included), "foreach" or "for_loop".
        optimizer_name: Class of the optimizer, like "AdamW".
        loader: Processes that make the batches: "workers" or "main process".
        num_workers: Worker processes of the loader.
        pinned_memory: Whether batches are copied from pinned memory.
        prefetched: Whether batches are copied on another stream than the one that computes.
        matmul_dtype: Arithmetic of most of the matmul time: "float32", "tf32", "bfloat16", "float16" or "float8".
        faster_dtypes: Arithmetics in which this device multiplies faster than in FP32, the easiest to use first.
        channels_last: Whether convolutions run without conversions between NCHW and NHWC.
        layout_ns: Nanoseconds per step spent converting between NCHW and NHWC.
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
    """An unusually long interval in which the host launched nothing (on a CPU: ran no operator).

    Attributes:
        step: Number of the step, from 1.
        length_ns: Time from one launch to the next.
        idle_ns: Part of the interval in which the device was idle because of it.
        name: Shortest recorded event that covers most of it; empty where nothing was recorded.
    """

    step: int
    length_ns: int
    idle_ns: int
    name: str = ""


class Stalls(Record):
    """The stalls of all profiled steps: intervals of host time that are not spent dispatching operators.

    Attributes:
        limit_ns: Minimum length of an interval without a launch to count as a stall.
        idle_ns: Time of the category `host` inside stalls.
        steps: Numbers of the steps that contain a stall, from 1.
        longest: The longest stalls, in descending order of length.
    """

    limit_ns: int
    idle_ns: int = 0
    steps: tuple[int, ...] = ()
    longest: tuple[Stall, ...] = ()


class Replay(Record):
    """Simulation of the recorded steps on their dependency graph: unchanged, and with one cause at a time removed.

    Attributes:
        recorded_ns: Time of a recorded step.
        step_time_ns: Simulated time of a step, without the profiler's cost where the unprofiled step is known.
        error: Error of a replay of the unchanged steps with the usual delay of every edge, as a share of the recorded
            step.
        event_cost_ns: Profiler's cost for each event; None where the unprofiled step is not known.
        host_slowdown: Factor by which the profiler slowed down the rest of the host's work; None where the unprofiled
            step is not known.
        unprofiled_error: Error of the replay without the profiler's cost, as a share of the unprofiled step.
        saved: Share of the step that is saved by removing a cause, by cause.
        uncertain: Uncertainty of `saved` by cause, as far as the unprofiled step leaves the profiler's cost open.
        together: Share that is saved by removing several causes at once, by their names joined with "+".
        refusal: Reason why the steps cannot be replayed; empty where they can.
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
    """Step time divided into exclusive categories, which sum to it exactly (integer nanoseconds)."""

    rank: int
    device: str
    num_steps: int
    step_time_ns: int
    """Length of the whole profiled interval; the categories sum to it."""
    categories: dict[str, int]
    quality: CaptureQuality
    unprofiled_step_time_ns: int | None = None
    """Mean step time in the measured windows, without the profiler; the shares are rescaled to it."""
    rescaled: dict[str, int] = field(default_factory=dict)
    """Nanoseconds per step by category. Host categories are scaled down so that the sum equals the unprofiled step
    time. Empty if unknown.
    """
    overlapped: dict[str, int] = field(default_factory=dict)
    """Communication and copies hidden behind compute; not part of the sum."""
    blocking: dict[str, int] = field(default_factory=dict)
    """Exposed communication for which compute that was already launched had to wait. During all other exposed
    communication, the device would have waited for the host anyway. Empty where the delay is not known (on a CPU).
    """
    steps: tuple[dict[str, int], ...] = ()
    """Nonzero categories of each step; summed over the steps, they equal `categories`."""
    phases: dict[str, int] = field(default_factory=dict)
    """Nanoseconds of the compute categories by phase of the step."""
    operators: tuple[str, ...] = ()
    """Names of the operators and kernels that take the most time, in descending order of time."""
    copies: tuple[str, ...] = ()
    """Names of the copies in the steps, as recorded in the trace."""
    facts: StepFacts = StepFacts()
    """Settings that the steps already use; all unknown in older records."""
    stalls: Stalls | None = None
    """Stalls of the profiled steps; None in older records."""
    replay: Replay | None = None
    """Replay of the process's steps, with and without each cause; None without device work, and in older records."""
    step_flops: float | None = None
    """FLOP per step of the process's matmuls, convolutions and attention, forward and backward, without recomputation;
    None where unknown."""
    mfu: float | None = None
    """Model FLOPs utilisation: `step_flops` over the FLOP that the devices could do at peak in the time of the step;
    None where either is unknown."""

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
        """Share of the category `host` that lies in stalls.

        The profiler makes dispatch longer, not stalls: in a rescaled step, stalls keep their length as far as it fits.
        """
        host_ns = self.per_step_ns.get("host", 0.0)
        if self.stalls is None or not self.stalls.idle_ns or not host_ns:
            return 0.0
        profiled_ns = self.categories["host"] / self.num_steps
        stalled_ns = self.stalls.idle_ns / self.num_steps * max(1.0, host_ns / profiled_ns)
        return min(1.0, stalled_ns / host_ns)

    def removable_ns(self, *categories: str) -> float:
        """Return the nanoseconds per step saved if these categories vanished. Communication counts only as far as
        compute had to wait for it.
        """
        times = self.per_step_ns
        held = {name: ns / self.categories[name] for name, ns in self.blocking.items() if self.categories.get(name)}
        return sum(times.get(name, 0.0) * held.get(name, 1.0) for name in categories)

    def removable_share(self, *categories: str) -> float:
        return self.removable_ns(*categories) / max(1.0, sum(self.per_step_ns.values()))

    def share(self, *categories: str) -> float:
        times = self.per_step_ns
        return sum(times.get(name, 0.0) for name in categories) / max(1.0, sum(times.values()))


class Finding(Record):
    """One observation about a breakdown, with its evidence and advice.

    Attributes:
        rule: Name of the rule, as docs/diagnosis.md lists them.
        message: What was seen.
        advice: What to do about it.
        strategies: Strategies that can help.
        evidence: Figures that support it, by name.
    """

    rule: str
    severity: str
    """Severity: "note", "warning" or "high"."""
    message: str
    advice: str
    strategies: tuple[str, ...]
    bound: float
    """Upper limit on the saving from fixing the finding's cause, as a share of the step."""
    evidence: dict[str, float | str] = field(default_factory=dict)
    claim: float | None = None
    """Share of the step that fixing this finding's cause saves in addition to fixing the findings before it; an upper
    limit if it was not replayed. These shares do not overlap, so they add up. None where the fix saves nothing by
    itself, and in older records.
    """
