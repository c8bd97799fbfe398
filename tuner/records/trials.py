"""One run of one candidate: the request, the outcome, and all measurements."""

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
    """Trial of the recommended candidate, complete or without one of its parts, to measure a part's contribution."""
    MOVED = "moved"
    """Trial of the reference or the incumbent, repeated because trials now run on another machine."""


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
    """Time limits of the phases, in seconds, after which a trial counts as hung."""

    build_s: float = 300.0
    guard_s: float = 300.0
    warm_up_s: float = 300.0
    measure_s: float = 120.0
    profile_s: float = 120.0
    report_s: float = 60.0
    starting_s: float | None = None
    """Limit for build, guard and warm-up together; None sets no limit."""

    def of(self, phase: Phase) -> float:
        return float(getattr(self, f"{phase.value}_s"))


class TrialSpec(Record):
    """Specification of one run of one candidate: everything that the trial server and its ranks need."""

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
    """True if a choice is lossy or changes the recipe; the guard then judges the loss curve over a longer horizon."""
    unit_roundoff: float = 2.0**-24
    """Unit roundoff of the coarsest arithmetic that a `rounding` choice asks for; determines the tolerance."""
    checks_loader: bool = False
    profile: bool = True
    keep_trace: bool = False
    environment_variables: dict[str, str] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    deadlines: Deadlines = Deadlines()
    run_id: str = ""
    """Id of this run, by which its ranks find each other. A repeated trial has a new id, so its ranks cannot find those
    of an earlier run.
    """
    requested_at_ns: int = 0
    """Value of `time.monotonic_ns()` when the trial was requested (one clock for all processes of a host)."""


class Effect(Record):
    """Evidence, seen in the running job, that a choice took effect.

    Attributes:
        strategy: Name of the strategy.
        took: Whether it took effect.
        detail: What was seen in the job.
    """

    strategy: str
    took: bool
    detail: str


class Failure(Record):
    """Failure that ended a trial early, with its phase.

    Attributes:
        kind: Kind of failure, for programs.
        phase: Phase in which it happened.
        message: Description of the failure, in a readable form.
        rank: Rank that failed first.
        signal: Signal that ended the process; None where it ended by itself.
        traceback: Traceback of the exception; empty without one.
        error: Class of the exception with its module; empty without one.
    """

    kind: FailureKind
    phase: Phase
    message: str
    rank: int = 0
    signal: int | None = None
    traceback: str = ""
    error: str = ""


class Attempt(Record):
    """Earlier run of a repeated trial: its failure says nothing about the candidate.

    Attributes:
        failure: Failure that ended it: of its own ranks, or of another trial of its group.
        began_at: Time of its start in ISO 8601, UTC.
        duration_ns: Time from its start to its end.
    """

    failure: Failure
    began_at: str
    duration_ns: int


class TrialResult(Record, dict=True):
    """Result of one run of one candidate; after a crash, the part of the result that is known."""

    trial_id: str
    candidate: Candidate
    purpose: Purpose
    group: str
    """Id of the group of trials that ran at the same time and took turns."""
    windows: tuple[Window, ...] = ()
    startup: Startup | None = None
    epoch_restart_ns: int | None = None
    """Cost of an epoch restart: time from the last batch of an epoch to the first of the next."""
    steps_per_epoch: int | None = None
    memory: tuple[MemoryPeak, ...] = ()
    breakdowns: tuple[Breakdown, ...] = ()
    profile: TrialProfile | None = None
    findings: tuple[Finding, ...] = ()
    guard: GuardVerdict | None = None
    effects: tuple[Effect, ...] = ()
    compilation: Compilation | None = None
    """Record of the candidate's compilation; None where nothing was compiled."""
    failure: Failure | None = None
    contended: bool = False
    """True if there were too few clean windows because others used the machine."""
    unmeasured: tuple[str, ...] = ()
    """Device readings that were not available, with the reason; a missing reading does not make a window void."""
    interpreter: str = "forked"
    isolation: str = "none"
    phases_ns: dict[str, int] = field(default_factory=dict)
    trace_digest: str | None = None
    place: str = ""
    """Hash of the machine and its devices, without names; rates with different hashes are not compared."""
    repeated: tuple[Attempt, ...] = ()
    """Earlier runs of this trial, oldest first; the other fields describe the last run."""

    @functools.cached_property
    def ok(self) -> bool:
        """True if the trial was measured and is still the same training."""
        return self.failure is None and bool(self.clean_windows) and (self.guard is None or self.guard.passed)

    @property
    def is_rejected(self) -> bool:
        """True if the guard found that the training differs; other load on the machine does not affect this verdict."""
        return self.guard is not None and not self.guard.passed

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
    """One row of a study: a requested run, and its result once complete."""

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
