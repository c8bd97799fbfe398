"""One process start of one candidate: what is asked for, how it ends, all that it showed."""

from __future__ import annotations

import functools
from enum import StrEnum

from msgspec import field

from steptune.tuner.records.base import Record
from steptune.tuner.records.breakdowns import Breakdown, Finding
from steptune.tuner.records.choices import Candidate, Choice
from steptune.tuner.records.compilation import Compilation
from steptune.tuner.records.guard import GuardVerdict
from steptune.tuner.records.measurements import MemoryPeak, Startup, Window
from steptune.tuner.records.profiles import TrialProfile


class Phase(StrEnum):
    """The phases of a trial, in order; each has a deadline."""

    BUILD = "build"
    GUARD = "guard"
    WARM_UP = "warm_up"
    MEASURE = "measure"
    PROFILE = "profile"
    REPORT = "report"


class Purpose(StrEnum):
    """Purpose of a trial."""

    BASELINE = "baseline"
    EXPLORE = "explore"
    REPLICATE = "replicate"
    SENTINEL = "sentinel"
    COMPANION = "companion"
    AUDIT = "audit"
    CONFIRM = "confirm"
    CONTRIBUTION = "contribution"
    """The answer again, or the answer without one of its parts."""
    MOVED = "moved"
    """Reference or incumbent again, in another place than the figures before."""


class FailureKind(StrEnum):
    """Kind of failure that ended a trial early."""

    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"
    NUMERICS = "numerics"
    TIMEOUT = "timeout"
    CRASH = "crash"
    WORKLOAD_ERROR = "workload_error"
    INFRASTRUCTURE = "infrastructure"


class TrialState(StrEnum):
    """State of a trial. A running trial whose process died is lost."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    LOST = "lost"


class Deadlines(Record):
    """Seconds that each phase may take before the trial counts as hung."""

    build_s: float = 300.0
    guard_s: float = 300.0
    warm_up_s: float = 300.0
    measure_s: float = 120.0
    profile_s: float = 120.0
    report_s: float = 60.0
    starting_s: float | None = None
    """Build, guard and warm-up together; None sets no limit."""

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
    """Roundoff of the coarsest arithmetic that a `rounding` choice asks for; selects the tolerance."""
    checks_loader: bool = False
    profile: bool = True
    keep_trace: bool = False
    environment_variables: dict[str, str] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    deadlines: Deadlines = Deadlines()
    run_id: str = ""
    """Identity of this run: where its ranks meet. A trial that is repeated meets where no earlier run's ranks did."""
    requested_at_ns: int = 0
    """`time.monotonic_ns()` when the trial was asked for (one clock for all processes of a host)."""


class Effect(Record):
    """Evidence that a choice did what it says, seen in the running job.

    Attributes:
        strategy: The strategy.
        took: It did.
        detail: What was seen.
    """

    strategy: str
    took: bool
    detail: str


class Failure(Record):
    """Failure that ended a trial early, with its phase.

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


class Attempt(Record):
    """A run of a trial that was repeated, because how it ended says nothing about the candidate.

    Attributes:
        failure: How it ended: of its own ranks, or of a trial that was alive beside it.
        began_at: ISO 8601, UTC.
        duration_ns: From then to its end.
    """

    failure: Failure
    began_at: str
    duration_ns: int


class TrialResult(Record, dict=True):
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
    """Compilation of the candidate; None where nothing was compiled."""
    failure: Failure | None = None
    contended: bool = False
    """Fewer clean windows than asked for: others used the machine."""
    unmeasured: tuple[str, ...] = ()
    """Readings of the devices that could not be had, and why: windows are not void for what is not seen."""
    interpreter: str = "forked"
    isolation: str = "none"
    phases_ns: dict[str, int] = field(default_factory=dict)
    trace_digest: str | None = None
    place: str = ""
    """Hash of the machine and its devices, without names; rates of different places are not compared."""
    repeated: tuple[Attempt, ...] = ()
    """Runs of this trial before the one that the rest is about, the oldest first."""

    @functools.cached_property
    def ok(self) -> bool:
        """Measured, and still the same training."""
        return self.failure is None and bool(self.clean_windows) and (self.guard is None or self.guard.passed)

    @functools.cached_property
    def clean_windows(self) -> tuple[Window, ...]:
        return tuple(window for window in self.windows if window.void is None)

    @property
    def duration_ns(self) -> int:
        return sum(self.phases_ns.values())

    @property
    def ran_out_of_memory(self) -> bool:
        return self.failure is not None and self.failure.kind is FailureKind.OUT_OF_MEMORY

    @property
    def peak_memory_bytes(self) -> int:
        return max((peak.device_bytes or peak.resident_bytes for peak in self.memory), default=0)


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
