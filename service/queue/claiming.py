"""Selection of the study that a free worker gets.

Users take turns. Among those who may start a study now (quotas), in this order:

1. the priority that an administrator gave the user, higher first: users who need more ask an administrator;
2. fewer studies running;
3. less device time in the last 30 days;

and of the one user's studies

4. those that have begun before those that have not: half a study is of use to nobody;
5. the priority that the user gave the study, higher first. It orders a user's own studies and never another's, or
   everybody would give their own the highest;
6. the oldest.

On a cluster whose hosts workers reserve, a study that has waited long for them goes before these (`draining`).

A study is for one hardware profile, because figures of different machines are not compared. One that has begun goes
on with a worker of its own profile; with one of another only where its user named a part of a label ("H100") that
both have, which says that such machines may stand for each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, case, exists, false, func, not_, or_, select, true
from sqlalchemy.orm import Session

from steptune.service.isolation import NONE
from steptune.service.models import QueueEntryRow, ResourceSlotRow, StudyRow, UserRow
from steptune.service.places import CORE, CUDA, Slot
from steptune.service.queue.draining import Due
from steptune.service.queue.records import Quotas, WorkerOffer, stored_kind
from steptune.service.queue.usage import Usage, limits_by_owner, num_hosts, usage_by_owner
from steptune.tuner.records import StudyState
from steptune.tuner.workloads.reference import COMMAND


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A user's next study, among those that the worker could run."""

    study_id: str
    owner_id: str | None
    priority: int
    queued_at: datetime


def candidates(
    session: Session,
    offer: WorkerOffer,
    now: datetime,
    quotas: Quotas,
    *,
    leaving: Collection[str] = (),
    without: str | None = None,
    due: Due | None = None,
) -> Iterator[Candidate]:
    """Yield one study for each user who may start one, in the order of the users' turns.

    Args:
        leaving: Studies that the worker must not take for now.
        without: A study that the worker would give up first.
        due: The study that goes first on the worker's cluster.
    """
    num_devices = num_free_devices(session, offer, now, without)
    first = _first_of_each_owner(session, offer, num_devices, now, leaving, due)
    usage = usage_by_owner(session, now) if first else {}
    limits = limits_by_owner(session, {found.owner_id: None for found in first}, quotas)

    def turn(found: Candidate) -> tuple[float, ...]:
        used = usage.get(found.owner_id, Usage())
        queued_at = found.queued_at.timestamp()
        return (-limits[found.owner_id].priority, used.running, used.device_seconds, -found.priority, queued_at)

    for found in sorted(first, key=turn):
        if not limits[found.owner_id].exceeded_by(usage.get(found.owner_id, Usage())):
            yield found


def claimable(now: datetime) -> ColumnElement[bool]:
    """Return the SQL condition that a study waits or has lost its worker. Without a lease, a running study belongs to
    the command line. With a lease, a queued study waits for hosts that its worker has requested from a cluster.
    """
    over = QueueEntryRow.lease_until <= now
    waits = and_(StudyRow.state == StudyState.QUEUED.value, or_(QueueEntryRow.lease_until.is_(None), over))
    return or_(waits, and_(StudyRow.state == StudyState.RUNNING.value, over))


def is_named(required: str | None, fingerprint: str | None, label: str) -> bool:
    """Say whether hardware with this fingerprint and label meets a requirement, which is a fingerprint or a part of a
    label.
    """
    return required is not None and (required == fingerprint or required.lower() in label.lower())


def _fits(session: Session, offer: WorkerOffer, num_devices: int) -> ColumnElement[bool]:
    """Return the SQL condition that a study with at most this number of devices may run on a worker's hardware."""
    wanted = QueueEntryRow.required_hardware
    all_wanted = session.scalars(select(wanted).where(wanted.is_not(None)).distinct()).all()
    shapes: list[ColumnElement[bool]] = [false()]
    for number in range(1, num_devices + 1):
        profile = offer.profile_for(number)
        named = wanted.in_([text for text in all_wanted if is_named(text, profile.fingerprint, profile.label)])
        begun = StudyRow.hardware_fingerprint
        goes_on_here = or_(begun.is_(None), begun == profile.fingerprint, named)
        shapes.append(and_(QueueEntryRow.num_devices == number, or_(wanted.is_(None), named), goes_on_here))
    kind = QueueEntryRow.required_device_kind
    has = offer.profile.device_kind
    kinds = or_(kind.is_(None), kind.in_([has, stored_kind(has, 2), stored_kind(None, 2)]))
    runs_it = true() if runs_scripts(offer.isolation) else not_(StudyRow.workload.startswith(COMMAND))
    return and_(kinds, runs_it, or_(*shapes))


def runs_scripts(isolation: str) -> bool:
    """Say whether a worker with this isolation level runs scripts: only "none" does, because the other levels forbid
    the mount of the script's folder.
    """
    return isolation == NONE


def num_free_devices(session: Session, offer: WorkerOffer, now: datetime, without: str | None = None) -> int:
    """Return the number of devices that a worker could claim now; 0 where any of its cores is taken.

    Args:
        without: A study whose devices count as free.
    """
    taken = taken_slots(session, offer.host_id, now, without)
    if any(Slot(kind=CORE, number=core) in taken for core in offer.cores):
        return 0
    if offer.profile.device_kind != CUDA:
        return 1
    free = 0
    while free < len(offer.gpus) and Slot(kind=CUDA, number=offer.gpus[free]) not in taken:
        free += 1
    return free


def taken_slots(session: Session, host_id: str, now: datetime, without: str | None = None) -> set[Slot]:
    """Return the slots of a host that are held by live claims of any study except `without`. Slots of dead claims are
    free.
    """
    alive = exists().where(
        QueueEntryRow.study_id == ResourceSlotRow.study_id,
        QueueEntryRow.fence == ResourceSlotRow.fence,
        QueueEntryRow.lease_until > now,
        QueueEntryRow.study_id != (without or ""),
    )
    taken = select(ResourceSlotRow.kind, ResourceSlotRow.number).where(ResourceSlotRow.host_id == host_id, alive)
    return {Slot(kind=kind, number=number) for kind, number in session.execute(taken)}


def _first_of_each_owner(
    session: Session,
    offer: WorkerOffer,
    num_devices: int,
    now: datetime,
    leaving: Collection[str],
    due: Due | None,
) -> list[Candidate]:
    if num_devices == 0:
        return []
    begun_first = case((QueueEntryRow.num_claims > 0, 0), else_=1)
    order = (begun_first, QueueEntryRow.priority.desc(), QueueEntryRow.queued_at, QueueEntryRow.study_id)
    place = func.row_number().over(partition_by=StudyRow.owner_id, order_by=order).label("place")
    ranked = (
        select(StudyRow.study_id, StudyRow.owner_id, QueueEntryRow.priority, QueueEntryRow.queued_at, place)
        .join(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id)
        .outerjoin(UserRow, UserRow.user_id == StudyRow.owner_id)
        .where(claimable(now), _fits(session, offer, num_devices), num_hosts(session) <= offer.max_hosts)
        .where(StudyRow.study_id.not_in(leaving), true() if due is None else due.leaves())
        .subquery()
    )
    first = select(ranked).where(ranked.c.place == 1)
    return [
        Candidate(study_id=row.study_id, owner_id=row.owner_id, priority=row.priority, queued_at=row.queued_at)
        for row in session.execute(first)
    ]
