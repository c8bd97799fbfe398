"""A study: what the user asked for, where it is in its life, and what belongs to it beside its trials."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import field

from steptune.tuner.records.base import Record
from steptune.tuner.records.choices import Numerics
from steptune.tuner.records.environment import Environment
from steptune.tuner.records.measurements import MeasureSettings
from steptune.tuner.records.workload_facts import WorkloadFacts


class StudyState(StrEnum):
    """State of a study. Completed, cancelled and failed studies have ended."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"


class StudySettings(Record):
    """A user's settings of a study.

    Attributes:
        budget_s: Seconds that the search may take.
        max_trials: Most trials; None for as many as the budget allows.
        allow: Numerics that need consent and have it.
        only: Strategies to try; empty for all.
        skip: Strategies not to try.
        seed: Of the search, the samples and the initial state.
        measure: How windows are taken.
        num_ranks: Processes of the training.
        num_hosts: That they are on; under torchrun and srun the launch says it.
        device: "cpu" or "cuda"; None for CUDA where there is one.
        memory_limit_bytes: Most memory of a trial.
        remeasure_links: Whether links between ranks are measured that an earlier study has measured.
        confirm_blocks: Paired comparisons of each finalist with the baseline, unless the answer is clear earlier; two
            at least where time is short.
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
    num_hosts: int = 1
    device: str | None = None
    memory_limit_bytes: int | None = None
    remeasure_links: bool = False
    confirm_blocks: int = 5
    num_finalists: int = 2
    phase_timeout_s: float | None = None
    """Seconds that any phase of a trial may take; None allows multiples of what the baseline took."""
    search: str = "model"
    """Name of the search that proposes the trials."""
    objective: str = "throughput"
    """The objective, as `tuner/objectives.py` reads it."""


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
    """Digest of the workload's own file, so that results of an edited workload are not mixed."""
    steptune_version: str = ""


class Artifact(Record):
    """A file that belongs to a study, known by its content."""

    study_id: str
    trial_id: str | None
    """Trial of the file; None for a file of the whole study."""
    kind: str
    digest: str
    """SHA-256 of the content, in hexadecimal digits."""
    size_bytes: int
    created_at: str


class Event(Record):
    """Event of a study; append-only, in order.

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
    data: dict[str, Any] = field(default_factory=dict)
