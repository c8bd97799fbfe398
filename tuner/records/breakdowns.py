"""Where the time of a profiled step goes, how far that may be believed, and what it shows."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from steptune.tuner.records.base import Record


class StepPhase(StrEnum):
    """Which part of the training step computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    OTHER = "other"


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
    rescaled: dict[str, int] = field(default_factory=dict)
    """Per step: host categories shrunk so that the sum is the unprofiled step; empty if unknown."""
    overlapped: dict[str, int] = field(default_factory=dict)
    """Beside the sum: communication and copies hidden behind compute."""
    blocking: dict[str, int] = field(default_factory=dict)
    """Of exposed communication: what held compute up that was launched already. Without it the device would have
    waited for the host. Empty where that is not known (a CPU)."""
    steps: tuple[dict[str, int], ...] = ()
    """The categories of each step that are not zero; together they are `categories`."""
    phases: dict[str, int] = field(default_factory=dict)
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
