"""Usage of devices by users: for quotas, and for taking turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import JSON, ColumnElement, cast, delete, func, or_, select, type_coerce
from sqlalchemy.orm import Session

from steptune.service.models import DeletedUsageRow, QueueEntryRow, StudyRow, UserRow
from steptune.service.queue.records import AND, Quotas

RECENT = timedelta(days=30)


@dataclass
class Usage:
    """Usage of one user."""

    running: int = 0
    """Number of studies that hold devices; those that wait for a reservation do not."""
    device_seconds: float = 0.0
    """Device seconds of studies that have not ended, or ended in the last 30 days, including deleted ones."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one user: their own, or the settings' defaults."""

    priority: int = 0
    max_running: int | None
    max_queued: int | None
    max_device_hours: float | None
    disabled: bool = False

    def exceeded_by(self, usage: Usage) -> str:
        """Return the reason why none of the user's studies may start; empty if there is no such reason."""
        if self.disabled:
            return "its user to be enabled by an administrator"
        if self.max_running is not None and usage.running >= self.max_running:
            return f"its user to have fewer running studies than the limit of {self.max_running}"
        if self.max_device_hours is not None and usage.device_seconds >= 3600 * self.max_device_hours:
            return f"its user's device hours in {RECENT.days} days to fall below the limit of {self.max_device_hours:g}"
        return ""


def usage_by_owner(session: Session, now: datetime) -> dict[str | None, Usage]:
    """Return the usage of every user who has used devices in the last 30 days."""
    found: dict[str | None, Usage] = {}
    ended = (
        select(StudyRow.owner_id, func.sum(QueueEntryRow.device_seconds))
        .join(StudyRow, StudyRow.study_id == QueueEntryRow.study_id)
        .where(
            QueueEntryRow.device_seconds > 0,
            or_(QueueEntryRow.ended_at.is_(None), QueueEntryRow.ended_at > now - RECENT),
        )
        .group_by(StudyRow.owner_id)
    )
    deleted = (
        select(DeletedUsageRow.owner_id, func.sum(DeletedUsageRow.device_seconds))
        .where(DeletedUsageRow.ended_at > now - RECENT)
        .group_by(DeletedUsageRow.owner_id)
    )
    for owner_id, seconds in [*session.execute(ended), *session.execute(deleted)]:
        found.setdefault(owner_id, Usage()).device_seconds += seconds
    held = (
        select(StudyRow.owner_id, QueueEntryRow.num_devices * _NUM_HOSTS_HELD, QueueEntryRow.claimed_at)
        .join(StudyRow, StudyRow.study_id == QueueEntryRow.study_id)
        .where(QueueEntryRow.lease_until > now, QueueEntryRow.claimed_at.is_not(None))
    )
    for owner_id, num_devices, claimed_at in session.execute(held):
        usage = found.setdefault(owner_id, Usage())
        usage.running += 1
        usage.device_seconds += num_devices * max(0.0, (now - (claimed_at or now)).total_seconds())
    return found


_NUM_HOSTS_HELD = 1 + (
    func.length(QueueEntryRow.place) - func.length(func.replace(QueueEntryRow.place, AND, ""))
) // len(AND)
"""Number of hosts that a study holds now: fewer than requested while a lost one has not been replaced."""


def num_hosts(session: Session) -> ColumnElement[int]:
    """Return the SQL expression for the number of hosts of a study: 1 for studies of older versions, which do not state
    it.
    """
    is_postgresql = session.get_bind().dialect.name == "postgresql"
    record = cast(StudyRow.record, JSON) if is_postgresql else type_coerce(StudyRow.record, JSON)
    return func.coalesce(record["settings"]["num_hosts"].as_integer(), 1)


def keep_usage(session: Session, study: StudyRow, entry: QueueEntryRow, now: datetime) -> None:
    """Store the usage of a study that is about to be deleted, and forget usage that is too old to count."""
    session.execute(delete(DeletedUsageRow).where(DeletedUsageRow.ended_at <= now - RECENT))
    if study.owner_id is not None and entry.device_seconds > 0:
        session.add(
            DeletedUsageRow(
                owner_id=study.owner_id, device_seconds=entry.device_seconds, ended_at=entry.ended_at or now
            )
        )


def limits_of(user: UserRow | None, quotas: Quotas) -> Limits:
    """Return a user's own limits; those not set are the settings' defaults."""
    if user is None:
        return Limits(
            max_running=quotas.max_running, max_queued=quotas.max_queued, max_device_hours=quotas.max_device_hours
        )
    return Limits(
        priority=user.priority,
        max_running=quotas.max_running if user.max_running is None else user.max_running,
        max_queued=quotas.max_queued if user.max_queued is None else user.max_queued,
        max_device_hours=quotas.max_device_hours if user.max_device_hours is None else user.max_device_hours,
        disabled=user.disabled_at is not None,
    )


def limits_by_owner(session: Session, owners: Mapping[str | None, object], quotas: Quotas) -> dict[str | None, Limits]:
    """Return the limits of these users; the owner None stands for studies of the command line."""
    known = select(UserRow).where(UserRow.user_id.in_([owner for owner in owners if owner is not None]))
    users = {user.user_id: user for user in session.scalars(known)}
    return {owner: limits_of(users.get(owner or ""), quotas) for owner in owners}
