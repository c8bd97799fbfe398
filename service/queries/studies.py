"""Studies as the interface shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Engine, Select, func, select, update

from service.connections import reading, writing
from service.messages import StudyDetail, StudyQueueState, StudySummary
from service.models import QueueEntryRow, RecommendationRow, StudyRow, TrialRow
from service.queries.stored import iso, iso_or_none, parts_of
from tuner.errors import StateConflict


@dataclass(frozen=True, kw_only=True)
class StudyFilter:
    """Which studies are listed; None is any.

    Attributes:
        workload: The reference as it was given.
    """

    owner_id: str | None = None
    state: str | None = None
    workload_id: str | None = None
    workload: str | None = None
    hardware: str | None = None


class Owner(NamedTuple):
    """Whose something is; None for the command line's."""

    exists: bool
    owner_id: str | None


def list_studies(engine: Engine, wanted: StudyFilter, *, limit: int, before: str | None) -> list[StudySummary]:
    """The newest first, those with ids below `before`; one more than `limit` where there are more."""
    # The same ids, from the table whose index has the filter before them.
    study_id = StudyRow.study_id if wanted.workload_id is None else QueueEntryRow.study_id
    query = _narrowed(_summaries(), wanted).order_by(study_id.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(study_id < before)
    with reading(engine) as session:
        return [StudySummary(**_summary(row)) for row in session.execute(query)]


def find_study(engine: Engine, study_id: str) -> StudyDetail | None:
    """A study, if it exists. Whose it is, is for the caller to check."""
    query = _summaries().add_columns(StudyRow.record, QueueEntryRow).where(StudyRow.study_id == study_id)
    counts = select(TrialRow.state, func.count()).where(TrialRow.study_id == study_id).group_by(TrialRow.state)
    with reading(engine) as session:
        row = session.execute(query).one_or_none()
        if row is None:
            return None
        num_trials = {found[0]: found[1] for found in session.execute(counts)}
        return _detail(row, num_trials)


def study_owner(engine: Engine, study_id: str) -> Owner:
    """Whether there is such a study, and whose it is."""
    with reading(engine) as session:
        row = session.execute(select(StudyRow.owner_id).where(StudyRow.study_id == study_id)).one_or_none()
        return Owner(exists=row is not None, owner_id=None if row is None else row[0])


def owners_of(engine: Engine, study_ids: Sequence[str]) -> dict[str, str | None]:
    """Whose these studies are."""
    query = select(StudyRow.study_id, StudyRow.owner_id).where(StudyRow.study_id.in_(study_ids))
    with reading(engine) as session:
        return {row[0]: row[1] for row in session.execute(query)}


def version_of_study(engine: Engine, study_id: str) -> int | None:
    """The version of its queue entry; None without one."""
    with reading(engine) as session:
        return session.scalar(select(QueueEntryRow.version).where(QueueEntryRow.study_id == study_id))


def change_study(engine: Engine, study_id: str, version: int, *, title: str | None, priority: int | None) -> None:
    """Changes what is not None.

    Raises:
        StateConflict: Somebody changed it since it was at this version.
    """
    entry = update(QueueEntryRow).where(QueueEntryRow.study_id == study_id, QueueEntryRow.version == version)
    changes = {} if priority is None else {"priority": priority}
    with writing(engine) as session:
        changed = session.scalars(entry.values(version=version + 1, **changes).returning(QueueEntryRow.study_id)).all()
        if not changed:
            raise StateConflict(f"study {study_id} was changed by somebody else at this moment: read it, and try again")
        if title is not None:
            session.execute(update(StudyRow).where(StudyRow.study_id == study_id).values(title=title))


def _summaries() -> Select[*tuple[Any, ...]]:
    return (
        select(
            StudyRow.study_id,
            StudyRow.title,
            StudyRow.workload,
            StudyRow.owner_id,
            StudyRow.state,
            StudyRow.created_at,
            StudyRow.hardware_fingerprint,
            QueueEntryRow.source_id,
            QueueEntryRow.priority,
            QueueEntryRow.worker_id,
            RecommendationRow.verdict,
            RecommendationRow.gain,
        )
        .outerjoin(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id)
        .outerjoin(RecommendationRow, RecommendationRow.study_id == StudyRow.study_id)
    )


def _narrowed(query: Select[*tuple[Any, ...]], wanted: StudyFilter) -> Select[*tuple[Any, ...]]:
    if wanted.owner_id is not None:
        query = query.where(StudyRow.owner_id == wanted.owner_id)
    if wanted.state is not None:
        query = query.where(StudyRow.state == wanted.state)
    if wanted.workload_id is not None:
        query = query.where(QueueEntryRow.source_id == wanted.workload_id)
    if wanted.workload is not None:
        query = query.where(StudyRow.workload == wanted.workload)
    if wanted.hardware is not None:
        query = query.where(StudyRow.hardware_fingerprint == wanted.hardware)
    return query


def _summary(row: Any) -> dict[str, Any]:
    return {
        "study_id": row.study_id,
        "title": row.title,
        "workload": row.workload,
        "workload_id": row.source_id,
        "owner_id": row.owner_id,
        "state": row.state,
        "created_at": iso(row.created_at),
        "hardware_fingerprint": row.hardware_fingerprint,
        "priority": row.priority or 0,
        "worker_id": row.worker_id,
        "verdict": row.verdict,
        "gain": row.gain,
    }


def _detail(row: Any, num_trials: dict[str, int]) -> StudyDetail:
    record = parts_of(row.record)
    return StudyDetail(
        **_summary(row),
        message=record.get("message", ""),
        settings=record["settings"],
        facts=record.get("facts"),
        environment=record.get("environment"),
        num_trials=num_trials,
        queue=None if row.QueueEntryRow is None else _queue_state(row.QueueEntryRow),
        source_digest=record.get("source_digest", ""),
        steptune_version=record.get("steptune_version", ""),
    )


def _queue_state(entry: QueueEntryRow) -> StudyQueueState:
    return StudyQueueState(
        version=entry.version,
        required_device_kind=entry.required_device_kind,
        required_hardware=entry.required_hardware,
        num_devices=entry.num_devices,
        waits_for="",
        requested=entry.requested,
        num_claims=entry.num_claims,
        num_lost=entry.num_lost,
        device_seconds=entry.device_seconds,
        queued_at=iso(entry.queued_at),
        claimed_at=iso_or_none(entry.claimed_at),
        ended_at=iso_or_none(entry.ended_at),
    )
