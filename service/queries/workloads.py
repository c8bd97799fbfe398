"""Queries of submitted workloads: uploads, zoo entries, modules on the workers."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import Engine, exists, select

from steptune.service.artifacts.quotas import check_artifact_bytes
from steptune.service.connections import reading, writing
from steptune.service.messages import WorkloadInfo
from steptune.service.models import QueueEntryRow, WorkloadSourceRow
from steptune.service.queries.stored import message
from steptune.tuner.errors import StateConflictError


def add_workload(
    engine: Engine,
    source_id: str,
    owner_id: str,
    *,
    kind: str,
    name: str,
    entry: str,
    digest: str | None = None,
    size_bytes: int = 0,
    max_bytes: int | None = None,
) -> WorkloadInfo:
    """Add a new workload.

    Args:
        max_bytes: Maximum bytes that an owner without an own limit may keep.

    Raises:
        QuotaExceededError: The owner keeps more than they may with it.
    """
    row = WorkloadSourceRow(
        source_id=source_id,
        owner_id=owner_id,
        kind=kind,
        name=name,
        entry=entry,
        digest=digest,
        size_bytes=size_bytes,
        created_at=datetime.now(UTC),
    )
    with writing(engine) as session:
        session.add(row)
        session.flush()
        if digest is not None:
            check_artifact_bytes(session, owner_id, max_bytes)
        return _info(row)


def list_workloads(engine: Engine, owner_id: str | None, *, limit: int, before: str | None) -> list[WorkloadInfo]:
    """Return workloads, the newest first: up to `limit` + 1, so that the caller sees if there are more."""
    query = select(WorkloadSourceRow).order_by(WorkloadSourceRow.source_id.desc()).limit(limit + 1)
    if owner_id is not None:
        query = query.where(WorkloadSourceRow.owner_id == owner_id)
    if before is not None:
        query = query.where(WorkloadSourceRow.source_id < before)
    with reading(engine) as session:
        return [_info(row) for row in session.scalars(query)]


def find_workload(engine: Engine, source_id: str) -> WorkloadInfo | None:
    with reading(engine) as session:
        row = session.get(WorkloadSourceRow, source_id)
        return None if row is None else _info(row)


def delete_workload(engine: Engine, source_id: str) -> None:
    """Forget a workload; garbage collection removes the uploaded file.

    Raises:
        StateConflictError: Studies refer to it.
    """
    with writing(engine) as session:
        row = session.get(WorkloadSourceRow, source_id, with_for_update=True)  # no study refers to it from now on
        if session.scalar(select(exists().where(QueueEntryRow.source_id == source_id))):
            raise StateConflictError(f"studies refer to workload {source_id}: delete these studies first")
        if row is not None:
            session.delete(row)


def _info(row: WorkloadSourceRow) -> WorkloadInfo:
    return message(WorkloadInfo, row, workload_id=row.source_id)
