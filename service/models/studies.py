"""The tables of studies. They mirror the records of `steptune.tuner.records`.

Values that are searched or aggregated have columns; the complete record is kept beside them as JSON
(`steptune.tuner.store_rules.encode`), so that reading gives back exactly what was stored. Numbers that are not
a number are NULL in columns. Rows of a study or a trial are deleted with it.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from steptune.service.models.base import COUNTER, Base, study_key, trial_key


class WorkloadRow(Base):
    """A workload that was tuned, as it was last inspected."""

    __tablename__ = "workloads"
    __table_args__ = (UniqueConstraint("reference", "signature"), Index(None, "signature"))

    workload_id: Mapped[str] = mapped_column(primary_key=True)
    reference: Mapped[str]
    name: Mapped[str]
    signature: Mapped[str]
    global_batch: Mapped[int]
    record: Mapped[str]


class HardwareProfileRow(Base):
    __tablename__ = "hardware_profiles"

    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    device_kind: Mapped[str] = mapped_column(index=True)
    label: Mapped[str]
    record: Mapped[str]


class TopologyRow(Base):
    """The links between ranks, as they were last measured."""

    __tablename__ = "topologies"

    hardware_fingerprint: Mapped[str] = mapped_column(primary_key=True)
    host_of_rank: Mapped[str] = mapped_column(primary_key=True)
    """Host number of each rank: "0,0,1,1"."""
    num_ranks: Mapped[int]
    num_hosts: Mapped[int]
    measured_at: Mapped[datetime]
    record: Mapped[str]


class StudyRow(Base):
    __tablename__ = "studies"
    __table_args__ = (
        Index(None, "state", "study_id"),
        Index(None, "owner_id", "study_id"),
        Index(None, "owner_id", "state", "study_id", "revision"),
        Index(None, "workload_id", "study_id"),
        Index(None, "workload", "study_id"),
        Index(None, "hardware_fingerprint", "study_id"),
    )

    study_id: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[str | None] = mapped_column(ForeignKey("users.user_id"))
    """The owner; NULL for studies of the command line, which only administrators see in the service."""
    title: Mapped[str] = mapped_column(server_default="")
    workload: Mapped[str]
    """Reference of the workload as the user gave it."""
    workload_id: Mapped[str | None] = mapped_column(ForeignKey("workloads.workload_id"))
    """The inspected workload; NULL until it was inspected."""
    hardware_fingerprint: Mapped[str | None] = mapped_column(ForeignKey("hardware_profiles.fingerprint"))
    state: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(index=True)
    record: Mapped[str]
    revision: Mapped[int] = mapped_column(server_default="0")
    """Revision number of the study; grows with every change of the study, its trials, decisions, answer and files.
    Rendered HTML pages that were cached at an older revision are invalid.
    """
    tags: Mapped[str] = mapped_column(server_default="")
    """Tags that the owner gave, each between spaces, so that a text search finds single tags: ` vit nightly `."""
    notes: Mapped[str] = mapped_column(server_default="")


class TrialRow(Base):
    """One trial. `record` is the trial as it began; `state` and `result` are its outcome. Columns for lists are
    computed once, when it completes (`steptune.tuner.trial_figures`).
    """

    __tablename__ = "trials"
    __table_args__ = (UniqueConstraint("study_id", "sequence"), Index(None, "study_id", "state", "sequence"))

    trial_id: Mapped[str] = mapped_column(primary_key=True)
    study_id: Mapped[str] = mapped_column(study_key())
    sequence: Mapped[int]
    candidate_key: Mapped[str] = mapped_column(index=True)
    purpose: Mapped[str]
    trial_group: Mapped[str]
    replicate: Mapped[int]
    state: Mapped[str]
    failure_kind: Mapped[str | None]
    record: Mapped[str]
    result: Mapped[str | None]
    step_time_ns: Mapped[float | None]
    units_per_s: Mapped[float | None]
    num_windows: Mapped[int] = mapped_column(server_default="0")
    gain: Mapped[float | None]


class TrialAttemptRow(Base):
    """One process start of a trial, and how it ended (a trial state; "running" until then)."""

    __tablename__ = "trial_attempts"

    trial_id: Mapped[str] = mapped_column(trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    outcome: Mapped[str]
    fence: Mapped[int] = mapped_column(server_default="0")
    """Fencing number of the lease under which the attempt ran; 0 without a queue."""
    worker_id: Mapped[str | None]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class BreakdownRow(Base):
    """Time of one category on one device of one rank."""

    __tablename__ = "breakdowns"

    trial_id: Mapped[str] = mapped_column(trial_key(), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    device: Mapped[str] = mapped_column(primary_key=True)
    category: Mapped[str] = mapped_column(primary_key=True, index=True)
    num_steps: Mapped[int]
    ns: Mapped[int]
    """Time of the category over all `num_steps` profiled steps, in nanoseconds."""
    rescaled_ns: Mapped[int | None]
    """Time of the category per step, in nanoseconds, rescaled to the unprofiled step; NULL where that step is unknown.
    """


class KernelStatsRow(Base):
    """Totals of one kernel in the profile of a trial; only the kernels with the most time have rows."""

    __tablename__ = "kernel_stats"

    trial_id: Mapped[str] = mapped_column(trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str]
    category: Mapped[str]
    count: Mapped[int]
    total_ns: Mapped[int]
    max_ns: Mapped[int]
    record: Mapped[str]


class GapStatsRow(Base):
    """Totals of the gaps with one cause before one kernel; only the pairs of cause and kernel with the most time have
    rows.
    """

    __tablename__ = "gap_stats"

    trial_id: Mapped[str] = mapped_column(trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    category: Mapped[str]
    kernel_after: Mapped[str]
    count: Mapped[int]
    total_ns: Mapped[int]
    record: Mapped[str]


class CollectiveStatsRow(Base):
    """Totals of the calls of one collective with messages of one size."""

    __tablename__ = "collective_stats"

    trial_id: Mapped[str] = mapped_column(trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str]
    group_size: Mapped[int]
    message_bytes: Mapped[int]
    count: Mapped[int]
    total_ns: Mapped[int]
    exposed_ns: Mapped[int]
    bus_bytes_per_s: Mapped[float | None]
    record: Mapped[str]


class FindingRow(Base):
    __tablename__ = "findings"

    trial_id: Mapped[str] = mapped_column(trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rule: Mapped[str] = mapped_column(index=True)
    severity: Mapped[str]
    bound: Mapped[float | None]
    record: Mapped[str]


class DecisionRow(Base):
    __tablename__ = "decisions"

    study_id: Mapped[str] = mapped_column(study_key(), primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    stage: Mapped[str]
    verdict: Mapped[str]
    candidate_key: Mapped[str | None] = mapped_column(index=True)
    predicted_bound: Mapped[float | None]
    measured_gain: Mapped[float | None]
    record: Mapped[str]


class RecommendationRow(Base):
    """The recommendation of a study."""

    __tablename__ = "recommendations"
    __table_args__ = (Index(None, "workload_signature", "device_kind"),)

    study_id: Mapped[str] = mapped_column(study_key(), primary_key=True)
    created_at: Mapped[datetime]
    workload_signature: Mapped[str]
    device_kind: Mapped[str]
    verdict: Mapped[str]
    candidate_key: Mapped[str]
    gain: Mapped[float | None]
    """Ratio of the recommendation's rate to the baseline's; NULL unless the gain is proven."""
    bottleneck_before: Mapped[str | None]
    bottleneck_after: Mapped[str | None]
    tuning_s: Mapped[float | None]
    record: Mapped[str]


class StrategyOutcomeRow(Base):
    """Outcome of one strategy in a study with an answer: how often it was tried, and its contribution to the answer."""

    __tablename__ = "strategy_outcomes"

    study_id: Mapped[str] = mapped_column(study_key(), primary_key=True)
    strategy: Mapped[str] = mapped_column(primary_key=True)
    num_tried: Mapped[int]
    gain: Mapped[float | None]
    """Contribution of the strategy as a ratio of speeds; NULL where it is no part of the answer."""


class ArtifactRow(Base):
    """A file; its content is stored once by digest, however many trials have it."""

    __tablename__ = "artifacts"
    __table_args__ = (
        Index(None, "study_id", "artifact_id"),
        Index(None, "trial_id", "artifact_id"),
        {"sqlite_autoincrement": True},
    )

    artifact_id: Mapped[int] = mapped_column(COUNTER, primary_key=True)
    study_id: Mapped[str] = mapped_column(study_key())
    trial_id: Mapped[str | None] = mapped_column(trial_key())
    kind: Mapped[str]
    digest: Mapped[str] = mapped_column(index=True)
    size_bytes: Mapped[int]
    created_at: Mapped[datetime]


class EventRow(Base):
    """An event. Rows are only added, and numbers are never used again."""

    __tablename__ = "events"
    __table_args__ = (
        Index(None, "study_id", "event_id"),
        Index(None, "owner_id", "event_id"),
        {"sqlite_autoincrement": True},
    )

    event_id: Mapped[int] = mapped_column(COUNTER, primary_key=True)
    study_id: Mapped[str] = mapped_column(study_key())
    owner_id: Mapped[str | None]
    """The study's owner, which never changes; repeated here for an index on owner and number."""
    kind: Mapped[str]
    at: Mapped[datetime]
    record: Mapped[str]
    """Data of the event, as JSON."""
