"""The tables. They mirror the records of `tuner.records`.

What is searched or aggregated is a column; the complete record is kept beside it as JSON
(`tuner.store_rules.encode`), so that reading gives back exactly what was stored. Numbers that are not
a number are NULL in columns. What belongs to a study or a trial goes when it goes.

Every change here needs a revision in migrations/versions/.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    BigInteger,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class UtcDateTime(TypeDecorator[datetime]):
    """An aware time in UTC. SQLite keeps no zone, so it is put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        assert value is None or value.tzinfo is not None, "times in the database have a zone"
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime(), str: Text(), int: BigInteger(), float: Double()}  # noqa: RUF012


_COUNTER = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only where the column is exactly INTEGER."""


def _study_key() -> ForeignKey:
    return ForeignKey("studies.study_id", ondelete="CASCADE")


def _trial_key() -> ForeignKey:
    return ForeignKey("trials.trial_id", ondelete="CASCADE")


class WorkloadRow(Base):
    """What was tuned, as it was last inspected."""

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


class StudyRow(Base):
    __tablename__ = "studies"

    study_id: Mapped[str] = mapped_column(primary_key=True)
    workload: Mapped[str]
    """The reference that the user gave."""
    workload_id: Mapped[str | None] = mapped_column(ForeignKey("workloads.workload_id"), index=True)
    """NULL until the workload was inspected."""
    hardware_fingerprint: Mapped[str | None] = mapped_column(ForeignKey("hardware_profiles.fingerprint"), index=True)
    state: Mapped[str] = mapped_column(index=True)
    created_at: Mapped[datetime] = mapped_column(index=True)
    record: Mapped[str]


class TrialRow(Base):
    """One trial. `record` is the trial as it began; `state` and `result` are what came of it."""

    __tablename__ = "trials"
    __table_args__ = (UniqueConstraint("study_id", "sequence"), Index(None, "study_id", "state"))

    trial_id: Mapped[str] = mapped_column(primary_key=True)
    study_id: Mapped[str] = mapped_column(_study_key())
    sequence: Mapped[int]
    candidate_key: Mapped[str] = mapped_column(index=True)
    purpose: Mapped[str]
    trial_group: Mapped[str]
    replicate: Mapped[int]
    state: Mapped[str]
    failure_kind: Mapped[str | None]
    record: Mapped[str]
    result: Mapped[str | None]


class TrialAttemptRow(Base):
    """One process start of a trial, and how it ended (a trial state; "running" until then)."""

    __tablename__ = "trial_attempts"

    trial_id: Mapped[str] = mapped_column(_trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    outcome: Mapped[str]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class WindowRow(Base):
    __tablename__ = "windows"

    trial_id: Mapped[str] = mapped_column(_trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Place among the windows of its trial, from 0."""
    round: Mapped[int]
    position: Mapped[int]
    num_steps: Mapped[int]
    num_samples: Mapped[int]
    num_units: Mapped[int]
    duration_ns: Mapped[int]
    step_p20_ns: Mapped[int]
    step_p50_ns: Mapped[int]
    step_p80_ns: Mapped[int]
    queue_depth_start: Mapped[int]
    queue_depth_end: Mapped[int]
    foreign_cpu_share: Mapped[float]
    void: Mapped[str | None]


class BreakdownRow(Base):
    """The time of one category on one device of one rank."""

    __tablename__ = "breakdowns"

    trial_id: Mapped[str] = mapped_column(_trial_key(), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    device: Mapped[str] = mapped_column(primary_key=True)
    category: Mapped[str] = mapped_column(primary_key=True, index=True)
    num_steps: Mapped[int]
    ns: Mapped[int]
    """Over the whole profiled stretch of `num_steps` steps."""
    rescaled_ns: Mapped[int | None]
    """Per step, rescaled to the unprofiled step; NULL where that is unknown."""


class KernelStatsRow(Base):
    """All runs of one kernel in the profile of a trial; the kernels with the most time."""

    __tablename__ = "kernel_stats"

    trial_id: Mapped[str] = mapped_column(_trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str]
    category: Mapped[str]
    count: Mapped[int]
    total_ns: Mapped[int]
    max_ns: Mapped[int]
    record: Mapped[str]


class GapStatsRow(Base):
    """All gaps of one cause that end with one kernel; those with the most time."""

    __tablename__ = "gap_stats"

    trial_id: Mapped[str] = mapped_column(_trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    category: Mapped[str]
    kernel_after: Mapped[str]
    count: Mapped[int]
    total_ns: Mapped[int]
    record: Mapped[str]


class CollectiveStatsRow(Base):
    """All calls of one collective with messages of one size."""

    __tablename__ = "collective_stats"

    trial_id: Mapped[str] = mapped_column(_trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str]
    group_size: Mapped[int]
    message_bytes: Mapped[int]
    count: Mapped[int]
    total_ns: Mapped[int]
    exposed_ns: Mapped[int]
    bus_bytes_per_s: Mapped[float | None]
    record: Mapped[str]


class GuardCheckRow(Base):
    __tablename__ = "guard_checks"

    trial_id: Mapped[str] = mapped_column(_trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str]
    kind: Mapped[str]
    passed: Mapped[bool]
    observed: Mapped[float | None]
    tolerance: Mapped[float | None]
    record: Mapped[str]


class FindingRow(Base):
    __tablename__ = "findings"

    trial_id: Mapped[str] = mapped_column(_trial_key(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rule: Mapped[str] = mapped_column(index=True)
    severity: Mapped[str]
    bound: Mapped[float | None]
    record: Mapped[str]


class DecisionRow(Base):
    __tablename__ = "decisions"

    study_id: Mapped[str] = mapped_column(_study_key(), primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    stage: Mapped[str]
    verdict: Mapped[str]
    candidate_key: Mapped[str | None] = mapped_column(index=True)
    predicted_bound: Mapped[float | None]
    measured_gain: Mapped[float | None]
    record: Mapped[str]


class RecommendationRow(Base):
    """The answer of a study."""

    __tablename__ = "recommendations"
    __table_args__ = (Index(None, "workload_signature", "device_kind"),)

    study_id: Mapped[str] = mapped_column(_study_key(), primary_key=True)
    created_at: Mapped[datetime]
    workload_signature: Mapped[str]
    device_kind: Mapped[str]
    verdict: Mapped[str]
    candidate_key: Mapped[str]
    gain: Mapped[float | None]
    """Rate over the baseline's rate; NULL where the baseline has none."""
    record: Mapped[str]


class ArtifactRow(Base):
    """A file, kept once under its digest however many trials have it."""

    __tablename__ = "artifacts"
    __table_args__ = {"sqlite_autoincrement": True}  # noqa: RUF012

    artifact_id: Mapped[int] = mapped_column(_COUNTER, primary_key=True)
    study_id: Mapped[str] = mapped_column(_study_key(), index=True)
    trial_id: Mapped[str | None] = mapped_column(_trial_key(), index=True)
    kind: Mapped[str]
    digest: Mapped[str] = mapped_column(index=True)
    size_bytes: Mapped[int]
    created_at: Mapped[datetime]


class EventRow(Base):
    """Something that happened. Rows are only ever added, and numbers are never used again."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "study_id", "event_id"), {"sqlite_autoincrement": True})

    event_id: Mapped[int] = mapped_column(_COUNTER, primary_key=True)
    study_id: Mapped[str] = mapped_column(_study_key())
    kind: Mapped[str]
    at: Mapped[datetime]
    record: Mapped[str]
    """The data, as JSON."""
