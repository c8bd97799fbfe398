"""Claims, heartbeats, ends of leases and wishes of users, in any order: what must hold always does."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from builders import TWO_CORES
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from sqlalchemy import select, update
from test_queue import submitted

from steptune.service.connections import create_engine_for, reading, writing
from steptune.service.database import migrate
from steptune.service.models import Base, QueueEntryRow, ResourceSlotRow, StudyRow
from steptune.service.queue import QueueEntry, StudyQueue, WorkerOffer
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import LeaseLostError, StateConflictError, StudyNotFoundError
from steptune.tuner.records import StudyState

WORKERS = {"both": (0, 1), "first": (0,), "second": (1,), "elsewhere": (0, 1)}
"""The first three share a host."""
MAX_LOSSES = 3
LEASE_S = 3600.0
"""No lease ends by itself, however busy the machine is: leases end where the machine of states says so."""
STOPPED = {"cancel": StudyState.CANCELLED, "pause": StudyState.PAUSED}
ENDED = {StudyState.COMPLETED, StudyState.CANCELLED, StudyState.FAILED}


class QueueMachine(RuleBasedStateMachine):
    """A queue with four workers of which any may fall silent at any moment."""

    url = ""
    studies = Bundle("studies")
    claims = Bundle("claims")

    @initialize()
    def an_empty_queue(self) -> None:
        self.engine = create_engine_for(self.url)
        with writing(self.engine) as session:
            for table in reversed(Base.metadata.sorted_tables):
                session.execute(table.delete())
        self.queue = StudyQueue(self.engine, max_losses=MAX_LOSSES, lease_s=LEASE_S)
        self.offers = {}
        for name, cores in WORKERS.items():
            host = "elsewhere" if name == "elsewhere" else "here"
            self.offers[name] = WorkerOffer(worker_id=name, name=name, host_id=host, profile=TWO_CORES, cores=cores)
            self.queue.register(self.offers[name])
        self.fences: Counter[str] = Counter()
        self.over: set[tuple[str, int]] = set()
        self.number = 0

    def teardown(self) -> None:
        self.engine.dispose()

    # --- what happens ----------------------------------------------------------------------------

    @rule(target=studies)
    def submit(self) -> str:
        self.number += 1
        return submitted(self.queue, f"study-{self.number}").study_id

    @rule(target=claims, name=st.sampled_from(sorted(WORKERS)))
    def claim(self, name: str):
        claim = self.queue.claim(self.offers[name])
        if claim is None:
            return multiple()
        lease = claim.lease
        assert lease.fence > self.fences[lease.study_id], "fences grow with every claim"
        self.fences[lease.study_id] = lease.fence
        return lease

    @rule(lease=claims)
    def heartbeat(self, lease) -> None:
        if self.is_over(lease):
            with pytest.raises(LeaseLostError):
                self.queue.heartbeat(lease)
        else:
            self.queue.heartbeat(lease)

    @rule(lease=claims)
    def write(self, lease) -> None:
        store = SqlStudyStore(self.engine, lease=lease)
        if self.is_over(lease):
            with pytest.raises(LeaseLostError):
                store.add_event(lease.study_id, "late", {})
        else:
            store.add_event(lease.study_id, "in time", {})

    @rule(
        lease=consumes(claims),
        state=st.sampled_from([StudyState.QUEUED, StudyState.COMPLETED, StudyState.PAUSED, StudyState.FAILED]),
        lost=st.booleans(),
    )
    def release(self, lease, state, lost) -> None:
        if self.is_over(lease):
            with pytest.raises(LeaseLostError):
                self.queue.release(lease, state, lost=lost)
        else:
            before = self.queue.entry(lease.study_id)
            self.queue.release(lease, state, lost=lost)
            assert self.queue.entry(lease.study_id).state is self.expected(before, state, lost)

    @staticmethod
    def expected(before: QueueEntry, state: StudyState, lost: bool) -> StudyState:
        """No wish of a user is forgotten."""
        if state in ENDED:
            return state
        if before.requested:
            return STOPPED[before.requested]
        return StudyState.FAILED if lost and before.num_lost + 1 >= MAX_LOSSES else StudyState.QUEUED

    @rule(lease=claims)
    def fall_silent(self, lease) -> None:
        """For longer than a lease."""
        with writing(self.engine) as session:
            silent = update(QueueEntryRow).where(
                QueueEntryRow.study_id == lease.study_id, QueueEntryRow.fence == lease.fence
            )
            session.execute(silent.values(lease_until=datetime.now(UTC) - timedelta(seconds=1)))
        self.over.add((lease.study_id, lease.fence))

    @rule()
    def bury(self) -> None:
        self.queue.bury()

    @rule(study_id=studies, what=st.sampled_from(["cancel", "pause", "resume"]))
    def wish(self, study_id, what) -> None:
        self.queue.bury(study_id)
        try:
            before = self.queue.entry(study_id)
        except StudyNotFoundError:
            return
        try:
            after = getattr(self.queue, what)(study_id)
        except StateConflictError:
            assert self.queue.entry(study_id) == before, "what is refused changes nothing"
        else:
            assert after.version >= before.version
            assert after == before or after.version > before.version, "a change is a new version"

    @rule(study_id=studies)
    def delete(self, study_id) -> None:
        held = [owner for owner, _ in self.live() if owner == study_id]
        try:
            self.queue.delete(study_id)
            assert not held
        except StateConflictError:
            assert held
        except StudyNotFoundError:
            pass

    # --- what always holds -----------------------------------------------------------------------

    @invariant()
    def a_study_has_one_live_lease_and_a_worker_does_not_hold_what_has_ended(self) -> None:
        if not hasattr(self, "queue"):
            return
        with reading(self.engine) as session:
            query = select(StudyRow.state, QueueEntryRow).join(QueueEntryRow)
            for state, entry in session.execute(query):
                if entry.lease_until is not None:
                    assert state == StudyState.RUNNING.value
                    assert entry.worker_id is not None
                else:
                    assert entry.worker_id is None
                    assert entry.requested == ""
                assert (entry.ended_at is not None) == (StudyState(state) in ENDED)
                assert entry.fence >= self.fences[entry.study_id]

    @invariant()
    def no_slot_is_shared(self) -> None:
        """Live claims of one host have no core in common, and each has exactly its worker's."""
        if not hasattr(self, "queue"):
            return
        live = dict(self.live())
        with reading(self.engine) as session:
            slots: dict[str, set[tuple[str, int]]] = {}
            for row in session.scalars(select(ResourceSlotRow).where(ResourceSlotRow.study_id.is_not(None))):
                entry = session.get(QueueEntryRow, row.study_id)
                if entry.fence == row.fence and row.study_id in live:
                    slots.setdefault(row.study_id, set()).add((row.host_id, row.number))
        for study_id, worker_id in live.items():
            offer = self.offers[worker_id]
            assert slots[study_id] == {(offer.host_id, core) for core in offer.cores}

    # --- looking ---------------------------------------------------------------------------------

    def live(self) -> list[tuple[str, str]]:
        """Studies and who holds them."""
        with reading(self.engine) as session:
            query = select(QueueEntryRow).where(QueueEntryRow.lease_until > datetime.now(UTC))
            return [(entry.study_id, entry.worker_id) for entry in session.scalars(query)]

    def is_over(self, lease) -> bool:
        with reading(self.engine) as session:
            fence = session.scalar(select(QueueEntryRow.fence).where(QueueEntryRow.study_id == lease.study_id))
        return fence != lease.fence or (lease.study_id, lease.fence) in self.over


@pytest.mark.parametrize(("database", "max_examples"), [("sqlite", 15), ("postgresql", 5)])
def test_the_queue_in_any_order(database, max_examples, tmp_path, request):
    """Both databases run the same statements; a server takes several times as long for them."""
    if database == "sqlite":
        url = f"sqlite:///{tmp_path}/steptune.db"
        migrate(url)
    else:
        url = request.getfixturevalue("postgres_url")
    machine = type("Machine", (QueueMachine,), {"url": url})
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(max_examples=max_examples, stateful_step_count=25))
