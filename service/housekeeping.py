"""Housekeeping by a worker or `steptune db gc`: end the claims of dead workers, forget what has expired, and remove
unneeded files.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, Engine, and_, delete, select

from steptune.service.artifacts import ArtifactStore
from steptune.service.artifacts.collection import collect_garbage
from steptune.service.artifacts.retention import apply_quotas, release_traces
from steptune.service.connections import reading, writing
from steptune.service.directories import remove_directories
from steptune.service.fencing import database_now
from steptune.service.models import AuditRow, Base, BrowserSessionRow, EventRow, IdempotencyKeyRow, QueueEntryRow
from steptune.service.progress import EVENT
from steptune.service.queue import open_queue
from steptune.service.settings import Settings
from steptune.tuner.records import Record

IDEMPOTENCY = timedelta(days=1)
PROGRESS = timedelta(days=1)
"""Time after a study's end for which its progress events, which are most of its rows, are kept."""
LATE = timedelta(days=30)
"""Time since a study's end after which housekeeping no longer checks the study."""


class HouseReport(Record):
    """Counts of what housekeeping removed."""

    num_idempotency_keys: int
    num_sessions: int
    num_audit_entries: int
    num_progress_events: int
    num_traces: int
    num_directories: int
    """Number of study directories removed on this machine."""
    num_files: int
    size_bytes: int


def keep_house(engine: Engine, artifacts: ArtifactStore, settings: Settings) -> HouseReport:
    """Clean up once; safe at any time, and where several processes do it at once.

    Raises:
        StoreError: The database or the artifacts cannot be used; CollectionBusyError where files are put all the time.
    """
    open_queue(engine, settings).bury()
    with reading(engine) as session:
        now = database_now(session)
    keys = _forget(engine, IdempotencyKeyRow, IdempotencyKeyRow.created_at < now - IDEMPOTENCY)
    sessions = _forget(engine, BrowserSessionRow, BrowserSessionRow.expires_at < now)
    audit = _forget(engine, AuditRow, AuditRow.at < now - timedelta(days=settings.audit_days))
    progress = _forget(engine, EventRow, _progress_of_ended(now))
    traces = release_traces(engine) + apply_quotas(engine, settings)
    directories = remove_directories(engine, settings.data_directory, grace_s=settings.artifact_grace_s)
    collected = collect_garbage(engine, artifacts, grace_s=settings.artifact_grace_s)
    return HouseReport(
        num_idempotency_keys=keys,
        num_sessions=sessions,
        num_audit_entries=audit,
        num_progress_events=progress,
        num_traces=traces,
        num_directories=directories,
        num_files=collected.num_files,
        size_bytes=collected.size_bytes,
    )


def _progress_of_ended(now: datetime) -> ColumnElement[bool]:
    ended = QueueEntryRow.ended_at
    studies = select(QueueEntryRow.study_id).where(ended < now - PROGRESS, ended > now - LATE)
    return and_(EventRow.kind == EVENT, EventRow.study_id.in_(studies))


def _forget(engine: Engine, table: type[Base], expired: ColumnElement[bool]) -> int:
    with writing(engine) as session:
        return cast(CursorResult[Any], session.execute(delete(table).where(expired))).rowcount
