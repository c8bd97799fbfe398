"""The queue of studies in a database. All queries of the queue are in this package."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace
from sqlalchemy import Engine, delete, func, select, update
from sqlalchemy.orm import Session

from steptune.service import rows
from steptune.service.connections import reading, writing
from steptune.service.fencing import Lease, database_now, hold
from steptune.service.models import QueueEntryRow, ResourceSlotRow, StudyRow, UserRow, WorkerRow
from steptune.service.queue.claiming import candidates
from steptune.service.queue.claims import (
    anything_to_do,
    claim_candidate,
    end_dead_claims,
    given_up,
    one_claim_at_a_time,
)
from steptune.service.queue.draining import Due, due_on, end_wait, holds_hosts, join_cluster, keep_wait
from steptune.service.queue.entries import (
    account,
    check_not_of_command_line,
    end_claim,
    entry_of,
    is_held,
    is_of_command_line,
    keep_source,
    locked,
    select_entries,
    set_state,
    wished,
)
from steptune.service.queue.records import BEGUN, ENDED, Claim, QueueEntry, Quotas, WorkerInfo, WorkerOffer, stored_kind
from steptune.service.queue.submission import check_queued, check_requirements
from steptune.service.queue.usage import Usage, keep_usage, limits_of, usage_by_owner
from steptune.service.queue.waiting import is_waiting, waits_for
from steptune.service.queue.workers import known_workers
from steptune.service.store import insert_missing, write_event, write_study
from steptune.tuner import store_rules
from steptune.tuner.errors import StateConflictError
from steptune.tuner.records import Study, StudyState

LEASE_S = 60.0
"""Default seconds without a heartbeat after which a worker counts as dead."""
HOSTS_WAIT_S = 600.0
"""Default seconds that a study waits for hosts taken by others, before it goes first on its cluster."""
MAX_LOSSES = 5
"""Default number of workers that may die in succession while they run a study, without completing a trial, before the
study fails.
"""
FORGET_WORKERS = timedelta(days=1)
_SAME = QueueEntryRow.version
"""SQL expression that leaves a row's version unchanged, because a heartbeat changes nothing that readers see."""


class StudyQueue:
    """Queue of studies that wait for workers, and of workers that wait for studies. Each method is one transaction.

    Args:
        engine: Engine of a database whose schema has been checked.
        quotas: Quotas of users without their own.
        lease_s: Seconds that a claim lasts without a heartbeat.
        max_losses: Consecutive deaths of workers after which a study fails.
        hosts_wait_s: Seconds after which a study that waits for hosts of a cluster goes first there.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        quotas: Quotas = Quotas(),  # noqa: B008 - frozen
        lease_s: float = LEASE_S,
        max_losses: int = MAX_LOSSES,
        hosts_wait_s: float = HOSTS_WAIT_S,
    ) -> None:
        self._engine = engine
        self._quotas = quotas
        self._lease_s = lease_s
        self._max_losses = max_losses
        self._hosts_wait_s = hosts_wait_s

    # --- what users do ---------------------------------------------------------------------------

    def submit(
        self,
        study: Study,
        *,
        owner_id: str | None,
        source_id: str | None = None,
        title: str = "",
        priority: int = 0,
        required_device_kind: str | None = None,
        required_hardware: str | None = None,
        num_devices: int = 1,
    ) -> QueueEntry:
        """Record a new study, which waits for a worker from now on.

        Args:
            source_id: Id of the upload; None for a zoo entry or a module on the workers.
            priority: Priority among the owner's own studies, higher first.
            required_device_kind: "cpu" or "cuda"; by default the device of the study's settings.
            required_hardware: A fingerprint of a hardware profile, or a part of its label.
            num_devices: Number of GPUs; on the CPU all cores of a worker are one device.

        Raises:
            QuotaExceededError: The owner has as many studies waiting as allowed.
            ChoiceError: A requirement that no worker can ever meet.
            WorkloadNotFoundError: The upload has been deleted.
            StoreError: There is a study with this id.
        """
        kind = required_device_kind or study.settings.device
        check_requirements(kind, required_hardware, num_devices)
        with writing(self._engine) as session:
            if session.get(StudyRow, study.study_id) is not None:
                raise store_rules.study_repeated(study.study_id)
            check_queued(session, owner_id, self._quotas)
            keep_source(session, source_id)
            write_study(session, replace(study, state=StudyState.QUEUED, message=""))
            owned = update(StudyRow).where(StudyRow.study_id == study.study_id)
            session.execute(owned.values(owner_id=owner_id, title=title))
            session.add(
                QueueEntryRow(
                    study_id=study.study_id,
                    source_id=source_id,
                    priority=priority,
                    required_device_kind=stored_kind(kind, study.settings.num_hosts),
                    required_hardware=required_hardware,
                    num_devices=num_devices,
                    queued_at=database_now(session),
                )
            )
            write_event(session, study.study_id, "state", {"state": StudyState.QUEUED.value, "message": ""})
            return self._entry(session, study.study_id)

    def entry(self, study_id: str) -> QueueEntry:
        """Return the state of a study in the queue.

        Raises:
            StudyNotFoundError: It was not submitted to the service.
        """
        with reading(self._engine) as session:
            return self._entry(session, study_id)

    def entries(self, study_ids: Sequence[str]) -> list[QueueEntry]:
        """Return the states of several studies in the queue, in this order; studies that were not submitted are left
        out.
        """
        with reading(self._engine) as session:
            return self._entries(session, study_ids)

    def under_way(
        self, owner_id: str | None, states: Collection[StudyState] = BEGUN, *, limit: int, after: str | None = None
    ) -> list[QueueEntry]:
        """Return the studies that hold devices or wait for some, by their ids.

        Args:
            owner_id: Owner of the studies; None for all.
            after: Return only studies with a higher id.
        """
        found = select(QueueEntryRow.study_id).join(StudyRow, StudyRow.study_id == QueueEntryRow.study_id)
        found = found.where(StudyRow.state.in_([state.value for state in states]))
        if owner_id is not None:
            found = found.where(StudyRow.owner_id == owner_id)
        if after is not None:
            found = found.where(QueueEntryRow.study_id > after)
        with reading(self._engine) as session:
            study_ids = session.scalars(found.order_by(QueueEntryRow.study_id).limit(limit)).all()
            return self._entries(session, study_ids)

    def cancel(self, study_id: str, version: int | None = None) -> QueueEntry:
        """Cancel a study permanently. A running study stops soon, and recommends its best configuration so far.

        Args:
            version: Version that the study must have; None for any.

        Raises:
            StudyNotFoundError: It was not submitted to the service.
            VersionConflictError: It has another version.
            StateConflictError: It has ended already.
        """
        return self._stop(study_id, "cancel", StudyState.CANCELLED, version)

    def pause(self, study_id: str, version: int | None = None) -> QueueEntry:
        """Pause a study until it is resumed. A running study stops soon.

        Args:
            version: Version that the study must have; None for any.

        Raises:
            StudyNotFoundError: It was not submitted to the service.
            VersionConflictError: It has another version.
            StateConflictError: It has ended, or is about to be cancelled.
        """
        return self._stop(study_id, "pause", StudyState.PAUSED, version)

    def resume(self, study_id: str, version: int | None = None) -> QueueEntry:
        """Requeue a paused, interrupted or failed study; no complete trial is run again.

        Args:
            version: Version that the study must have; None for any.

        Raises:
            StudyNotFoundError: It was not submitted to the service.
            VersionConflictError: It has another version.
            StateConflictError: It is not stopped, was cancelled, or is complete.
            QuotaExceededError: The owner has as many studies waiting as allowed.
        """
        self.bury(study_id)
        with writing(self._engine) as session:
            study, entry = locked(session, study_id, version)
            state = StudyState(study.state)
            if entry.requested == "pause":
                entry.requested = ""
                entry.version += 1
            elif state in (StudyState.PAUSED, StudyState.INTERRUPTED, StudyState.FAILED):
                check_queued(session, study.owner_id, self._quotas)
                entry.queued_at = database_now(session)
                entry.num_lost = 0
                end_claim(session, study, entry, StudyState.QUEUED)
            elif state is not StudyState.QUEUED:
                raise StateConflictError(
                    f"study {study_id} is {state.value}: only a paused, interrupted or failed study can be resumed"
                )
            session.flush()
            return self._entry(session, study_id)

    def delete(self, study_id: str, version: int | None = None) -> None:
        """Forget a study and everything measured in it; its device time still counts for quotas and turns.

        Args:
            version: Version that the study must have; None for any.

        Raises:
            StudyNotFoundError: It was not submitted to the service.
            VersionConflictError: It has another version.
            StateConflictError: A worker is running it, or a command.
        """
        with writing(self._engine) as session:
            study, entry = locked(session, study_id, version)
            now = database_now(session)
            if is_held(entry, now):
                raise StateConflictError(f"study {study_id} is running: cancel it first, then delete it")
            check_not_of_command_line(study, entry)
            account(entry, now)
            keep_usage(session, study, entry, now)
            session.execute(delete(StudyRow).where(StudyRow.study_id == study_id))

    def take_over(self, study_id: str) -> None:
        """Transfer a study to the command line: none of the service's workers runs it from now on. No effect if it was
        never submitted.

        Raises:
            StateConflictError: It is running in the service, or waits there for a worker.
        """
        self.bury(study_id)
        with writing(self._engine) as session:
            if session.get(QueueEntryRow, study_id) is None:
                return
            study, entry = locked(session, study_id)
            in_hand = StudyState(study.state) in BEGUN and not is_of_command_line(study, entry)
            if in_hand or is_held(entry, database_now(session)):
                raise StateConflictError(
                    f"study {study_id} is {study.state} in the service, whose workers run it: pause the study "
                    "there first"
                )
            entry.version += 1
            set_state(session, study, StudyState.RUNNING)

    # --- what workers do -------------------------------------------------------------------------

    def register(self, offer: WorkerOffer) -> None:
        """Register a worker, or update its offer. Workers that have long been gone are forgotten."""
        with writing(self._engine) as session:
            now = database_now(session)
            session.execute(delete(WorkerRow).where(WorkerRow.heartbeat_at < now - FORGET_WORKERS))
            insert_missing(session, rows.hardware_row(offer.profile))
            session.merge(
                WorkerRow(
                    worker_id=offer.worker_id,
                    name=offer.name,
                    host_id=offer.host_id,
                    state="idle",
                    hardware_fingerprint=offer.profile.fingerprint,
                    device_kind=offer.profile.device_kind,
                    devices=json.dumps([[slot.kind, slot.number] for slot in offer.slots]),
                    isolation=offer.isolation,
                    cluster=offer.cluster,
                    version=offer.version,
                    started_at=now,
                    heartbeat_at=now,
                )
            )
            for slot in offer.slots:
                insert_missing(session, ResourceSlotRow(host_id=offer.host_id, kind=slot.kind, number=slot.number))

    def beat(self, worker_id: str, state: str) -> bool:
        """Record that a worker is alive; return False if the worker was forgotten and must register again."""
        with writing(self._engine) as session:
            worker = session.get(WorkerRow, worker_id, with_for_update=True)
            if worker is not None:
                worker.state = state
                worker.heartbeat_at = database_now(session)
            return worker is not None

    def claim(
        self, offer: WorkerOffer, *, resting: Collection[str | None] = (), leaving: Collection[str] = ()
    ) -> Claim | None:
        """Claim the next study for a registered worker, with its devices; None where none fits or is allowed now.

        Where a cluster still has to reserve the devices, the study stays queued until `begin`.

        Args:
            resting: Owners whose studies this worker must not take for now.
            leaving: Studies that it must not take for now.
        """
        with reading(self._engine) as session:  # claims take turns, and most looks of idle workers find nothing
            if session.scalar(anything_to_do(database_now(session))) is None:
                return None
        with writing(self._engine) as session:
            one_claim_at_a_time(session)
            now = database_now(session)
            end_dead_claims(session, now, self._max_losses, takes_over=True)
            due = self._due(session, offer.cluster, now)
            for candidate in candidates(session, offer, now, self._quotas, leaving=leaving, due=due):
                if candidate.owner_id in resting:
                    continue
                claim = claim_candidate(session, candidate, offer, now, self._lease_s)
                if claim is not None:
                    return claim
            return None

    def gives_way(
        self,
        offer: WorkerOffer,
        *,
        resting: Collection[str | None] = (),
        leaving: Collection[str] = (),
        without: str,
    ) -> bool:
        """Say whether a worker must give up a study that waits for hosts: another study goes first on the cluster, or
        the worker could claim a study that may run now.

        Args:
            without: The study that the worker has.
        """
        with reading(self._engine) as session:
            now = database_now(session)
            due = self._due(session, offer.cluster, now)
            if due is not None and due.holds_up(session, session.get_one(StudyRow, without)):
                return True
            leaving = {*leaving, without}
            others = candidates(session, offer, now, self._quotas, leaving=leaving, without=without, due=due)
            return any(candidate.owner_id not in resting for candidate in others)

    def say_waiting(self, lease: Lease, why: str, *, cluster: str = "", can_be_met: bool = False) -> None:
        """Record why a study is still waiting for a cluster to reserve its devices.

        Args:
            cluster: Identity of the cluster; empty where it could not be asked.
            can_be_met: Whether its present nodes could give the devices.

        Raises:
            LeaseLostError: The lease is over.
        """
        with writing(self._engine) as session:
            hold(session, lease, lease.study_id)
            study, entry = locked(session, lease.study_id)
            keep_wait(entry, lease.worker_id, database_now(session), can_be_met=can_be_met)
            join_cluster(session, lease.worker_id, cluster)
            set_state(session, study, StudyState.QUEUED, why)

    def holds_hosts(self, cluster: str) -> bool:
        """Say whether any study of the service holds hosts of a cluster."""
        with reading(self._engine) as session:
            return holds_hosts(session, cluster, database_now(session))

    def wait_anew(self, lease: Lease) -> None:
        """Restart a study's wait for hosts, because no other study of the service holds any.

        Raises:
            LeaseLostError: The lease is over.
        """
        with writing(self._engine) as session:
            hold(session, lease, lease.study_id)
            _, entry = locked(session, lease.study_id)
            if entry.waits_since is not None:
                entry.waits_since = database_now(session)

    def begin(self, lease: Lease, place: str, *, cluster: str = "") -> str:
        """Begin a study whose devices a cluster has reserved: it runs, and uses device time, from now on. Also called
        when the cluster has lost or replaced some devices; their time so far is then added to the study's device time.

        Args:
            place: Hosts and devices.
            cluster: Identity of the cluster.

        Returns:
            Why the study may not start now, in which case it waits as before; empty where it has.

        Raises:
            LeaseLostError: The lease is over.
        """
        with writing(self._engine) as session:
            one_claim_at_a_time(session)
            now = database_now(session)
            hold(session, lease, lease.study_id)
            study, entry = locked(session, lease.study_id)
            join_cluster(session, lease.worker_id, cluster)
            if entry.claimed_at is None:
                user = session.get(UserRow, study.owner_id) if study.owner_id is not None else None
                usage = usage_by_owner(session, now).get(study.owner_id, Usage())
                if exceeded := limits_of(user, self._quotas).exceeded_by(usage):
                    return exceeded
                due = self._due(session, cluster, now)
                if due is not None and due.holds_up(session, study):
                    return due.reason
                end_wait(entry)
                entry.claimed_at = now
                entry.num_claims += 1
                set_state(session, study, StudyState.RUNNING)
            elif place != entry.place:
                account(entry, now)
                entry.claimed_at = now
            entry.place = place
            return ""

    def bury(self, study_id: str | None = None) -> None:
        """End the claims of dead workers, on one study or on all, without waiting for another worker. Pending requests
        of users are carried out, and all other studies wait again.
        """
        with writing(self._engine) as session:
            end_dead_claims(session, database_now(session), self._max_losses, study_id)

    def num_idle(self) -> int:
        """Return the number of workers that are alive and have no study."""
        with reading(self._engine) as session:
            silent = database_now(session) - timedelta(seconds=self._lease_s)
            alive = select(func.count()).where(WorkerRow.state == "idle", WorkerRow.heartbeat_at >= silent)
            return session.scalar(alive) or 0

    def heartbeat(self, lease: Lease, *, draining: bool = False) -> str:
        """Extend a lease, and record that its worker is alive.

        Args:
            draining: Whether the worker takes no further study.

        Returns:
            The user's request for the study: "", "cancel" or "pause".

        Raises:
            LeaseLostError: The lease is over.
        """
        with writing(self._engine) as session:
            now = database_now(session)
            hold(session, lease, lease.study_id, lease_until=now + timedelta(seconds=self._lease_s), version=_SAME)
            alive = update(WorkerRow).where(WorkerRow.worker_id == lease.worker_id)
            session.execute(alive.values(heartbeat_at=now, state="draining" if draining else "busy"))
            return session.scalar(select(QueueEntryRow.requested).where(QueueEntryRow.study_id == lease.study_id)) or ""

    def release(
        self, lease: Lease, state: StudyState, message: str = "", *, failed: bool = False, lost: bool = False
    ) -> None:
        """End a claim and free its devices. For a study that stops, a request of its user takes precedence over the
        worker's state, as the worker may not know the request.

        Args:
            state: State of the study from now on: QUEUED if another worker must continue it.
            failed: Whether the worker or its environment failed; the study then no longer requests hosts of a cluster.
            lost: Whether the failure is not transient: after too many in a row the study fails.

        Raises:
            LeaseLostError: The lease was over before.
        """
        with writing(self._engine) as session:
            hold(session, lease, lease.study_id)
            study, entry = locked(session, lease.study_id)
            ended = StudyState(study.state) in ENDED  # whatever went wrong after that
            state = StudyState(study.state) if ended else wished(entry, state)
            if failed and entry.asked_by == lease.worker_id:
                entry.asked_by = None
            if lost:
                entry.num_lost += 1
                if state is StudyState.QUEUED and entry.num_lost >= self._max_losses:
                    state, message = StudyState.FAILED, given_up(entry.num_lost, message)
            end_claim(session, study, entry, state, message)

    def leave(self, worker_id: str) -> None:
        """Remove a worker that stops."""
        with writing(self._engine) as session:
            session.execute(update(WorkerRow).where(WorkerRow.worker_id == worker_id).values(state="gone"))

    def workers(self) -> list[WorkerInfo]:
        """Return all known workers, the newest first."""
        with reading(self._engine) as session:
            return known_workers(session, database_now(session), self._lease_s)

    # --- pieces ----------------------------------------------------------------------------------

    def _stop(self, study_id: str, request: str, state: StudyState, version: int | None) -> QueueEntry:
        self.bury(study_id)
        with writing(self._engine) as session:
            study, entry = locked(session, study_id, version)
            found = StudyState(study.state)
            if found in ENDED and found is not state:
                raise StateConflictError(f"study {study_id} is {found.value} already: there is nothing to {request}")
            if request == "pause" and entry.requested == "cancel":
                raise StateConflictError(f"study {study_id} is about to be cancelled: it cannot be paused")
            if is_held(entry, database_now(session)):
                if entry.requested != request:
                    entry.requested = request
                    entry.version += 1
                    write_event(session, study_id, "requested", {"request": request})
            elif found is not state:
                check_not_of_command_line(study, entry)
                end_claim(session, study, entry, state)
            session.flush()
            return self._entry(session, study_id)

    def _due(self, session: Session, cluster: str, now: datetime) -> Due | None:
        patience, silence = timedelta(seconds=self._hosts_wait_s), timedelta(seconds=self._lease_s)
        return due_on(session, cluster, now, self._quotas, patience=patience, silence=silence)

    def _entry(self, session: Session, study_id: str) -> QueueEntry:
        found = self._entries(session, [study_id])
        if not found:
            raise store_rules.unknown_study(study_id)
        return found[0]

    def _entries(self, session: Session, study_ids: Sequence[str]) -> list[QueueEntry]:
        found = {study.study_id: (study, entry) for study, entry in session.execute(select_entries(study_ids))}
        ordered = [found[study_id] for study_id in study_ids if study_id in found]
        now = database_now(session)
        waiting = any(is_waiting(*entry, now) for entry in ordered)
        workers = known_workers(session, now, self._lease_s) if waiting else []
        dues = {cluster: self._due(session, cluster, now) for cluster in {worker.cluster for worker in workers}}
        reasons = waits_for(session, ordered, workers, dues, self._quotas, now)
        return [entry_of(*entry, reason) for entry, reason in zip(ordered, reasons, strict=True)]
