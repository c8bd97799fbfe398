"""Rows of studies and their queue entries: search and locks, the end of claims, and conversion for readers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Select, select, update
from sqlalchemy.orm import Session

from steptune.service.alike import record_like
from steptune.service.fencing import database_now
from steptune.service.models import QueueEntryRow, ResourceSlotRow, StudyRow, WorkloadSourceRow
from steptune.service.queue.draining import end_wait
from steptune.service.queue.records import AND, BEGUN, ENDED, QueueEntry, Source, kind_of
from steptune.service.queue.waiting import Entry
from steptune.service.store import lose_trials, write_event, write_state
from steptune.tuner import store_rules
from steptune.tuner.errors import StateConflictError, VersionConflictError, WorkloadNotFoundError
from steptune.tuner.records import Study, StudyState
from steptune.tuner.store_rules import decode


def select_entries(study_ids: Sequence[str] | None = None) -> Select[StudyRow, QueueEntryRow]:
    query = select(StudyRow, QueueEntryRow).join(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id)
    return query if study_ids is None else query.where(StudyRow.study_id.in_(study_ids))


def locked(session: Session, study_id: str, version: int | None = None) -> Entry:
    """Lock and return a study and its entry, in this order: entry, study.

    Args:
        version: Version that the entry must have; None for any.

    Raises:
        StudyNotFoundError: It was not submitted to the service.
        VersionConflictError: It has another version.
    """
    entry = session.get(QueueEntryRow, study_id, with_for_update=True)
    study = None if entry is None else session.get(StudyRow, study_id, with_for_update=True)
    if entry is None or study is None:
        raise store_rules.unknown_study(study_id)
    if version is not None and entry.version != version:
        raise VersionConflictError(f"study {study_id} is at version {entry.version} now, not {version}: read it again")
    return study, entry


def source_of(session: Session, entry: QueueEntryRow) -> Source | None:
    row = None if entry.source_id is None else session.get(WorkloadSourceRow, entry.source_id)
    return None if row is None else Source(kind=row.kind, entry=row.entry, digest=row.digest)


def keep_source(session: Session, source_id: str | None) -> None:
    """Lock an upload, so that nobody can delete it until the transaction ends.

    Raises:
        WorkloadNotFoundError: The upload is deleted already.
    """
    with_lock = {"read": True, "key_share": True}
    if source_id is not None and session.get(WorkloadSourceRow, source_id, with_for_update=with_lock) is None:
        raise WorkloadNotFoundError(f"there is no workload {source_id!r}: it was deleted; upload it again")


def is_held(entry: QueueEntryRow, now: datetime) -> bool:
    return entry.lease_until is not None and entry.lease_until > now


def is_of_command_line(study: StudyRow, entry: QueueEntryRow) -> bool:
    """Say whether a submitted study is being run by a command (`steptune resume`, after the service stopped it), not by
    a worker.
    """
    return study.state == StudyState.RUNNING.value and entry.lease_until is None


def check_not_of_command_line(study: StudyRow, entry: QueueEntryRow) -> None:
    """Refuse to stop or to forget a study that a command is running.

    Raises:
        StateConflictError: A command runs it.
    """
    if is_of_command_line(study, entry):
        raise StateConflictError(
            f"study {study.study_id} is run by a `steptune` command: stop that command with Ctrl-C"
        )


def wished(entry: QueueEntryRow, state: StudyState) -> StudyState:
    """Return the new state of a study that a worker gives back. A study that has not ended gets the state that its user
    requested; without a request, it is queued again.
    """
    if state not in (StudyState.QUEUED, StudyState.PAUSED):
        return state
    return {"cancel": StudyState.CANCELLED, "pause": StudyState.PAUSED}.get(entry.requested, StudyState.QUEUED)


def account(entry: QueueEntryRow, now: datetime) -> None:
    """Add the device time of a claim to the queue entry: the number of devices, times the time for which the claim held
    them, up to the end of its lease. A claim that only waited for a reservation adds none.
    """
    if entry.claimed_at is not None and entry.lease_until is not None:
        held = (min(now, entry.lease_until) - entry.claimed_at).total_seconds()
        entry.device_seconds += entry.num_devices * len(entry.place.split(AND)) * max(0.0, held)


def end_claim(session: Session, study: StudyRow, entry: QueueEntryRow, state: StudyState, message: str = "") -> None:
    """End a claim: the study has no worker and no running trial from now on, and its former worker's fencing number is
    outdated.
    """
    now = database_now(session)
    account(entry, now)
    entry.fence += 1
    entry.lease_until = entry.worker_id = None
    entry.requested = ""
    entry.version += 1
    entry.ended_at = None if state in (*BEGUN, StudyState.PAUSED) else entry.ended_at or now
    if state is not StudyState.QUEUED:
        end_wait(entry)
    freed = update(ResourceSlotRow).where(ResourceSlotRow.study_id == study.study_id)
    session.execute(freed.values(study_id=None))
    lose_trials(session, study.study_id)
    set_state(session, study, state, message)


def set_state(session: Session, study: StudyRow, state: StudyState, message: str = "") -> None:
    """Change the state of a study; one that has already ended in this state is left unchanged."""
    if state in ENDED and study.state == state.value:
        return
    if write_state(session, study, state, message):
        write_event(session, study.study_id, "state", {"state": state.value, "message": message})


def entry_of(study: StudyRow, entry: QueueEntryRow, waits: str) -> QueueEntry:
    record = decode(study.record, Study)
    return record_like(
        QueueEntry,
        entry,
        study,
        state=StudyState(study.state),
        message=record.message,
        required_device_kind=kind_of(entry.required_device_kind),
        num_hosts=record.settings.num_hosts,
        waits_for=waits,
    )
