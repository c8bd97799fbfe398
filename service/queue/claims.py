"""Claims of studies by workers: their beginning, and their end where a worker died."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, func, literal, or_, select, update
from sqlalchemy.orm import Session

from steptune.service import advisory_locks
from steptune.service.fencing import Lease
from steptune.service.models import QueueEntryRow, ResourceSlotRow, StudyRow, WorkerRow
from steptune.service.places import place_of
from steptune.service.queue.claiming import Candidate, claimable
from steptune.service.queue.entries import account, end_claim, select_entries, set_state, source_of, wished
from steptune.service.queue.records import Claim, WorkerOffer
from steptune.tuner.records import Study, StudyState
from steptune.tuner.store_rules import decode

_BOTH: dict[str, Any] = {"of": (QueueEntryRow, StudyRow), "skip_locked": True}
"""Options of a query that locks the rows of the study and of its queue entry, and skips locked rows. Without the lock,
PostgreSQL does not check the conditions again on a row that another transaction has changed.
"""


def anything_to_do(now: datetime) -> Select[int]:
    """Return a query that finds a row if there is a study to claim, or a claim of a dead worker to end."""
    over = QueueEntryRow.lease_until <= now  # also of a study that had ended: its claim is ended beside
    query = select(literal(1)).select_from(StudyRow)
    return (
        query.join(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id).where(or_(claimable(now), over)).limit(1)
    )


def one_claim_at_a_time(session: Session) -> None:
    """Take the lock that lets one transaction at a time claim studies; SQLite allows only one writer anyway."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(advisory_locks.CLAIMS)))


def claim_candidate(
    session: Session, candidate: Candidate, offer: WorkerOffer, now: datetime, lease_s: float
) -> Claim | None:
    """Give a study to the worker, unless another transaction is changing the study at this moment."""
    query = select_entries([candidate.study_id]).where(claimable(now))
    found = session.execute(query.with_for_update(**_BOTH)).one_or_none()
    if found is None:
        return None
    study, entry = found
    if study.state == StudyState.RUNNING.value:
        account(entry, now)
        entry.num_lost += 1
    entry.worker_id = offer.worker_id
    entry.fence += 1
    entry.num_claims += not offer.reserves
    entry.claimed_at = None if offer.reserves else now
    entry.lease_until = now + timedelta(seconds=lease_s)
    entry.version += 1
    slots = offer.slots_for(entry.num_devices)
    entry.place = place_of(offer.host_id, slots)
    for slot in slots:
        row = session.get_one(ResourceSlotRow, (offer.host_id, slot.kind, slot.number), with_for_update=True)
        row.study_id, row.fence = study.study_id, entry.fence
    set_state(session, study, StudyState.QUEUED if offer.reserves else StudyState.RUNNING)
    session.execute(update(WorkerRow).where(WorkerRow.worker_id == offer.worker_id).values(state="busy"))
    return Claim(
        lease=Lease(study_id=study.study_id, worker_id=offer.worker_id, fence=entry.fence),
        study=decode(study.record, Study),
        owner_id=study.owner_id,
        source=source_of(session, entry),
        other_hardware=entry.required_hardware is not None,
        slots=slots,
        place=entry.place,
    )


def end_dead_claims(
    session: Session, now: datetime, max_losses: int, study_id: str | None = None, *, takes_over: bool = False
) -> None:
    """End the claims of dead workers.

    Args:
        max_losses: Consecutive deaths of workers after which a study fails.
        study_id: Study whose claims are ended; None for all.
        takes_over: Leave claims that another worker will take over: of studies that have not ended, whose users do
            not want them to, and that do not kill workers.
    """
    lost = select_entries(None if study_id is None else [study_id]).where(QueueEntryRow.lease_until <= now)
    if takes_over:
        is_last = QueueEntryRow.num_lost + 1 >= max_losses
        lost = lost.where(or_(StudyRow.state != StudyState.RUNNING.value, QueueEntryRow.requested != "", is_last))
    for study, entry in session.execute(lost.with_for_update(**_BOTH)).all():
        if study.state == StudyState.QUEUED.value:  # it waited for hosts, and nothing of it ran
            end_claim(session, study, entry, wished(entry, StudyState.QUEUED))
            continue
        entry.num_lost += 1
        if study.state != StudyState.RUNNING.value:
            end_claim(session, study, entry, StudyState(study.state), decode(study.record, Study).message)
        elif entry.requested or entry.num_lost < max_losses:
            end_claim(session, study, entry, wished(entry, StudyState.QUEUED))
        else:
            end_claim(session, study, entry, StudyState.FAILED, given_up(entry.num_lost, ""))


def given_up(num_lost: int, message: str) -> str:
    """Return the message of a study that fails because its workers died."""
    because = f": {message}" if message else ""
    return (
        f"the study failed because {num_lost} workers in a row died while they ran it, before a trial was "
        f"complete{because}. Check that the machine has enough memory for the workload, then retry with `resume`"
    )
