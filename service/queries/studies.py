"""Queries of studies, for the REST interface."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Engine, Integer, Select, bindparam, func, select, update

from steptune.service.connections import querying, reading, writing
from steptune.service.messages import StudyDetail, StudyQueueState, StudySummary
from steptune.service.models import QueueEntryRow, RecommendationRow, StudyRow, TrialRow
from steptune.service.queries.packed import packed_rows
from steptune.service.queries.stored import iso, message, parts_of
from steptune.service.queue.records import kind_of
from steptune.tuner.errors import VersionConflictError
from steptune.tuner.records import StudyState, Verdict
from steptune.tuner.store_rules import unknown_study


@dataclass(frozen=True, kw_only=True)
class StudyFilter:
    """Filter of listed studies; None means any.

    Attributes:
        workload: The reference as it was given.
    """

    owner_id: str | None = None
    state: str | None = None
    workload_id: str | None = None
    workload: str | None = None
    hardware: str | None = None


class Owner(NamedTuple):
    """Existence and owner of a study; the owner is None if the command line created the study."""

    exists: bool
    owner_id: str | None


def list_studies(engine: Engine, wanted: StudyFilter, *, limit: int, before: str | None) -> list[StudySummary]:
    """Return studies with ids below `before`, the newest first: up to `limit` + 1 studies, so that the caller sees
    whether there are more than `limit`.
    """
    given = {name: value for name, value in dataclasses.asdict(wanted).items() if value is not None}
    if before is not None:
        given["before"] = before
    with querying(engine) as connection:
        rows = packed_rows(connection, _listing(frozenset(given)), {**given, "limit": limit + 1})
    return [_summary(*row) for row in rows]


def find_study(engine: Engine, study_id: str) -> StudyDetail | None:
    """Return a study; None where there is none. The caller must check its owner."""
    with querying(engine) as connection:
        row = connection.execute(_STUDY, {"study_id": study_id}).one_or_none()
        if row is None:
            return None
        num_trials = {found[0]: found[1] for found in connection.execute(_COUNTS, {"study_id": study_id})}
        return _detail(row, num_trials)


def study_owner(engine: Engine, study_id: str) -> Owner:
    """Return the owner of a study, if there is such a study."""
    with querying(engine) as connection:
        row = connection.execute(_OWNER, {"study_id": study_id}).one_or_none()
        return Owner(exists=row is not None, owner_id=None if row is None else row[0])


def owners_of(engine: Engine, study_ids: Sequence[str]) -> dict[str, str | None]:
    """Return the owners of these studies."""
    query = select(StudyRow.study_id, StudyRow.owner_id).where(StudyRow.study_id.in_(study_ids))
    with reading(engine) as session:
        return {row[0]: row[1] for row in session.execute(query)}


def version_of_study(engine: Engine, study_id: str) -> int | None:
    """Return the version of a study's queue entry; None if the study has no queue entry."""
    with reading(engine) as session:
        return session.scalar(select(QueueEntryRow.version).where(QueueEntryRow.study_id == study_id))


def change_study(
    engine: Engine,
    study_id: str,
    version: int | None,
    *,
    title: str | None = None,
    priority: int | None = None,
    tags: Sequence[str] | None = None,
    notes: str | None = None,
) -> None:
    """Change those fields of a study for which a value is given; None leaves a field unchanged.

    Args:
        version: Version that the study must have; None for any.

    Raises:
        StudyNotFoundError: It was not submitted to the service.
        VersionConflictError: It has another version.
    """
    entry = update(QueueEntryRow).where(QueueEntryRow.study_id == study_id)
    if version is not None:
        entry = entry.where(QueueEntryRow.version == version)
    changes = {} if priority is None else {"priority": priority}
    with writing(engine) as session:
        changed = entry.values(version=QueueEntryRow.version + 1, **changes).returning(QueueEntryRow.study_id)
        if not session.scalars(changed).all():
            if version is None:
                raise unknown_study(study_id)
            raise VersionConflictError(f"study {study_id} is no longer at version {version}: read it again")
        joined = None if tags is None else packed_tags(tags)
        given = {"title": title, "tags": joined, "notes": notes}
        written = {name: value for name, value in given.items() if value is not None}
        if written:
            session.execute(update(StudyRow).where(StudyRow.study_id == study_id).values(**written))


def packed_tags(tags: Sequence[str]) -> str:
    """Return tags in the form in which they are stored: without duplicates, each between spaces."""
    return f" {' '.join(dict.fromkeys(tags))} " if tags else ""


# Making a statement takes longer than running it, so those of reads are made once.
_SUMMARIES = (
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
NUM_SUMMARY_COLUMNS = len(_SUMMARIES.selected_columns)
_QUEUE_STATE = (
    QueueEntryRow.version,
    QueueEntryRow.required_device_kind,
    QueueEntryRow.required_hardware,
    QueueEntryRow.num_devices,
    QueueEntryRow.requested,
    QueueEntryRow.num_claims,
    QueueEntryRow.num_lost,
    QueueEntryRow.device_seconds,
    QueueEntryRow.queued_at,
    QueueEntryRow.claimed_at,
    QueueEntryRow.ended_at,
)
_STUDY = _SUMMARIES.add_columns(StudyRow.record, StudyRow.tags, StudyRow.notes, *_QUEUE_STATE).where(
    StudyRow.study_id == bindparam("study_id")
)
_COUNTS = (
    select(TrialRow.state, func.count()).where(TrialRow.study_id == bindparam("study_id")).group_by(TrialRow.state)
)
_OWNER = select(StudyRow.owner_id).where(StudyRow.study_id == bindparam("study_id"))


_FILTERS = {
    "owner_id": StudyRow.owner_id,
    "state": StudyRow.state,
    "workload_id": QueueEntryRow.source_id,
    "workload": StudyRow.workload,
    "hardware": StudyRow.hardware_fingerprint,
}


@functools.cache
def _listing(given: frozenset[str]) -> Select[*tuple[Any, ...]]:
    """Return the SQL query that lists studies with these filters, including `before` if it is among them."""
    # The same ids, from the table whose index has the filter before them.
    study_id = QueueEntryRow.study_id if "workload_id" in given else StudyRow.study_id
    query = _SUMMARIES.where(*(column == bindparam(name) for name, column in _FILTERS.items() if name in given))
    if "before" in given:
        query = query.where(study_id < bindparam("before"))
    return query.order_by(study_id.desc()).limit(bindparam("limit", type_=Integer))


def _summary(
    study_id: str,
    title: str,
    workload: str,
    owner_id: str | None,
    state: str,
    created_at: datetime | str,
    hardware: str | None,
    source_id: str | None,
    priority: int | None,
    worker_id: str | None,
    verdict: str | None,
    gain: float | None,
) -> StudySummary:
    """Build a summary from the columns of `_SUMMARIES`, in their order. Access to columns by name would take longer
    than the query.
    """
    return StudySummary(
        study_id=study_id,
        title=title,
        workload=workload,
        workload_id=source_id,
        owner_id=owner_id,
        state=StudyState(state),
        created_at=iso(created_at),
        hardware_fingerprint=hardware,
        priority=priority or 0,
        worker_id=worker_id,
        verdict=None if verdict is None else Verdict(verdict),
        gain=gain if verdict == Verdict.FASTER.value else None,  # older versions wrote those of others too
    )


def _detail(row: Any, num_trials: dict[str, int]) -> StudyDetail:
    record = parts_of(row.record)
    return StudyDetail(
        **msgspec.structs.asdict(_summary(*row[:NUM_SUMMARY_COLUMNS])),
        message=record.get("message", ""),
        settings=record["settings"],
        facts=record.get("facts"),
        environment=record.get("environment"),
        num_trials=num_trials,
        queue=None if row.version is None else _queue_state(row),
        source_digest=record.get("source_digest", ""),
        steptune_version=record.get("steptune_version", ""),
        tags=tuple(row.tags.split()),
        notes=row.notes,
    )


def _queue_state(entry: Any) -> StudyQueueState:
    return message(StudyQueueState, entry, required_device_kind=kind_of(entry.required_device_kind), waits_for="")
