"""A study: the user's request, its state, its artifacts and its events."""

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
    """State of a study; the final ones are completed, cancelled and failed."""

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
        budget_s: Time limit of the search, in seconds.
        max_trials: Maximum number of trials; None for as many as the budget allows.
        allow: Kinds of numerics that the user consents to.
        only: Strategies to try; empty for all.
        skip: Strategies not to try.
        seed: Seed of the search, the samples and the initial state.
        measure: Settings for timing the windows.
        num_ranks: Processes of the training.
        num_hosts: Number of hosts; under torchrun and srun, taken from the launcher.
        device: Kind of device: "cpu" or "cuda"; None for CUDA where such a device is present.
        memory_limit_bytes: Maximum memory of a trial.
        remeasure_links: Whether links between ranks are measured again although an earlier study has measured them.
        confirm_blocks: Paired comparisons of each finalist with the baseline, fewer if the answer is clear earlier; at
            least two if time is short.
        num_finalists: Number of candidates that are compared in the confirmation.
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
    """Time limit of each phase of a trial, in seconds; None for multiples of the baseline's time."""
    search: str = "model"
    """Name of the search method that proposes the trials."""
    objective: str = "throughput"
    """Objective, in the syntax of `tuner/objectives.py`."""


class Study(Record):
    """Search for the best configuration of one workload, on one hardware profile and within one budget."""

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
    """Digest of the workload's own file, so that results from before and after an edit of the workload are not mixed.
    """
    steptune_version: str = ""


class Artifact(Record):
    """A file that belongs to a study, identified by the hash of its content."""

    study_id: str
    trial_id: str | None
    """Id of the trial that the file belongs to; None for a file of the whole study."""
    kind: str
    digest: str
    """SHA-256 of the content, in hexadecimal digits."""
    size_bytes: int
    created_at: str


class Event(Record):
    """Event of a study. Events are only appended, in order.

    Attributes:
        sequence: Sequence number, increasing over all studies.
        study_id: Id of the study.
        at: Time in ISO 8601, UTC.
        kind: "state", "trials_ended", "recommended", …
        data: Further data, depending on the kind.
    """

    sequence: int
    study_id: str
    at: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
