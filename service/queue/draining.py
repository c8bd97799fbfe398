"""Precedence among studies that wait for hosts of the same cluster.

A cluster keeps no host free for a study that needs several, while others take each one that becomes free. So the
workers do: while a study is due on their cluster, none of them begins another one there, unless an administrator gave
the other study's user a higher priority. A study is due where

* it has waited longer than is allowed for hosts that the cluster's present nodes can give;
* the worker that last asked for them is alive and goes on taking studies, so that it comes back to this one;
* its user may start a study now, and wants neither to cancel nor to pause it.

Of several, the one whose user has the highest priority is due, and then the one that has waited longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, exists, func, or_, select, update
from sqlalchemy.orm import Session

from steptune.service.models import QueueEntryRow, StudyRow, UserRow, WorkerRow
from steptune.service.queue.records import Quotas
from steptune.service.queue.usage import Usage, limits_by_owner, num_hosts, usage_by_owner
from steptune.tuner.records import StudyState
from steptune.tuner.wording import counted


@dataclass(frozen=True, kw_only=True)
class Due:
    """A study that goes first on its cluster.

    Attributes:
        priority: Priority that an administrator gave its user.
        since: When it began to wait.
    """

    study_id: str
    priority: int
    num_hosts: int
    since: datetime

    def holds_up(self, session: Session, study: StudyRow) -> bool:
        """Say whether another study, not begun yet, must wait until this one has begun."""
        user = None if study.owner_id is None else session.get(UserRow, study.owner_id)
        return study.study_id != self.study_id and (0 if user is None else user.priority) <= self.priority

    def leaves(self) -> ColumnElement[bool]:
        """Return the SQL condition that a study may begin, for a query with an outer join to users."""
        return or_(StudyRow.study_id == self.study_id, func.coalesce(UserRow.priority, 0) > self.priority)

    @property
    def reason(self) -> str:
        """Return the reason why other studies wait."""
        return (
            f"hosts of the cluster, which are kept free for a study over {counted(self.num_hosts, 'host')} that "
            f"has been waiting since {self.since:%Y-%m-%d %H:%M} UTC"
        )


def due_on(
    session: Session, cluster: str, now: datetime, quotas: Quotas, *, patience: timedelta, silence: timedelta
) -> Due | None:
    """Return the study that goes first on a cluster; None if there is none.

    Args:
        cluster: Identity of the cluster; empty where it is not known.
        patience: Time that a study waits before it goes first.
        silence: Time without a heartbeat after which a worker counts as dead.
    """
    if not cluster:
        return None
    waiting = (
        select(StudyRow.study_id, StudyRow.owner_id, QueueEntryRow.waits_since, num_hosts(session).label("num_hosts"))
        .join(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id)
        .join(WorkerRow, WorkerRow.worker_id == QueueEntryRow.asked_by)
        .where(QueueEntryRow.waits_since <= now - patience, QueueEntryRow.requested == "")
        .where(StudyRow.state == StudyState.QUEUED.value, WorkerRow.cluster == cluster)
        .where(WorkerRow.state.in_(("idle", "busy")), WorkerRow.heartbeat_at > now - silence)
    )
    found = session.execute(waiting).all()
    if not found:
        return None
    usage = usage_by_owner(session, now)
    limits = limits_by_owner(session, {row.owner_id: None for row in found}, quotas)
    ready = [
        Due(
            study_id=row.study_id,
            priority=limits[row.owner_id].priority,
            num_hosts=row.num_hosts,
            since=row.waits_since,
        )
        for row in found
        if not limits[row.owner_id].exceeded_by(usage.get(row.owner_id, Usage()))
    ]
    return min(ready, key=lambda due: (-due.priority, due.since, due.study_id), default=None)


def keep_wait(entry: QueueEntryRow, worker_id: str, now: datetime, *, can_be_met: bool) -> None:
    """Record when a study began to wait for hosts, and which worker last requested them. Record no wait if the
    cluster's present nodes can never meet the worker's request. The first host of a request is the worker's own node.
    """
    if not can_be_met and entry.asked_by not in (None, worker_id):
        return
    entry.waits_since = (entry.waits_since or now) if can_be_met else None
    entry.asked_by = worker_id if can_be_met else None


def end_wait(entry: QueueEntryRow) -> None:
    """Forget that a study has waited: it has its hosts, or its user no longer wants any."""
    entry.waits_since = entry.asked_by = None


def join_cluster(session: Session, worker_id: str, cluster: str) -> None:
    """Record the cluster in which a worker reserves hosts, if the cluster has reported its identity."""
    if not cluster:
        return
    known = update(WorkerRow).where(WorkerRow.worker_id == worker_id, WorkerRow.cluster != cluster)
    session.execute(known.values(cluster=cluster))


def holds_hosts(session: Session, cluster: str, now: datetime) -> bool:
    """Say whether any study of the service holds hosts of a cluster now."""
    held = exists().where(
        QueueEntryRow.worker_id == WorkerRow.worker_id,
        WorkerRow.cluster == cluster,
        QueueEntryRow.lease_until > now,
        QueueEntryRow.claimed_at.is_not(None),
    )
    return bool(session.scalar(select(held)))
