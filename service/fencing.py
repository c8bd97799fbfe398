"""Leases: the right to write to a study for a limited time.

A worker that claims a study gets a lease with a fencing number, one higher than any before it. Whatever it writes,
it writes in a transaction that first locks the study's queue entry and finds its own number there, unexpired. A
worker that was presumed dead and comes back has an older number, and can write nothing.

Source: M. Kleppmann, "How to do distributed locking" (2016), on fencing tokens; C. Gray, D. Cheriton, "Leases"
(SOSP 1989).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import CursorResult, func, select, update
from sqlalchemy.orm import Session

from steptune.service.models import QueueEntryRow
from steptune.tuner.errors import LeaseLostError
from steptune.tuner.records import Record


class Lease(Record):
    """Lease that a worker got with its claim."""

    study_id: str
    worker_id: str
    fence: int


def database_now(session: Session) -> datetime:
    """Return the database's present time. The start time of the transaction would be too early if the transaction has
    waited.
    """
    if session.get_bind().dialect.name == "postgresql":
        return cast(datetime, session.scalar(select(func.clock_timestamp())))
    return datetime.now(UTC)  # SQLite has the clock of this host


def hold(session: Session, lease: Lease, study_id: str, **changes: Any) -> None:
    """Check the lease, lock the study's queue entry until the transaction ends, and advance the entry's version,
    because readers will see a change.

    Args:
        changes: Columns to set at the same time.

    Raises:
        LeaseLostError: The lease is over, was taken by another worker, or is of another study.
    """
    if study_id != lease.study_id:
        raise LeaseLostError(f"worker {lease.worker_id} holds study {lease.study_id}, not {study_id!r}")
    held = (
        update(QueueEntryRow)
        .where(
            QueueEntryRow.study_id == lease.study_id,
            QueueEntryRow.worker_id == lease.worker_id,
            QueueEntryRow.fence == lease.fence,
            QueueEntryRow.lease_until > database_now(session),
        )
        .values(**{"version": QueueEntryRow.version + 1, **changes})
        .execution_options(synchronize_session=False)
    )
    if cast(CursorResult[Any], session.execute(held)).rowcount != 1:
        raise LeaseLostError(
            f"worker {lease.worker_id} no longer holds study {lease.study_id} (claim {lease.fence}): its lease "
            "expired, so nothing was written; another worker may continue the study"
        )
