"""Order of studies on a cluster whose hosts several workers reserve, on SQLite and on PostgreSQL."""

from datetime import UTC, datetime, timedelta

import pytest
from builders import sample_study
from msgspec.structs import replace
from sqlalchemy import Engine, update
from test_queue import add_user, claimed, cluster_worker, cpu_worker, end_lease, submitted

from steptune.service.connections import writing
from steptune.service.fencing import Lease
from steptune.service.models import QueueEntryRow, UserRow, WorkerRow
from steptune.service.queue import StudyQueue, WorkerOffer
from steptune.tuner.records import StudySettings, StudyState

BUSY = "both nodes are busy"


@pytest.fixture
def queue(engine) -> StudyQueue:
    """A study that waits for hosts goes first at once."""
    return StudyQueue(engine, hosts_wait_s=0)


def worker(queue: StudyQueue, name: str, cluster: str = "shared") -> WorkerOffer:
    """One that knows its cluster, on a host of its own."""
    return cluster_worker(queue, name, host_id=name, cluster=cluster)


def submit_wide(queue: StudyQueue, study_id: str = "wide", owner_id: str | None = None) -> None:
    settings = StudySettings(num_ranks=4, num_hosts=2)
    study = sample_study(study_id=study_id, facts=None, environment=None, settings=settings, message="")
    queue.submit(study, owner_id=owner_id)


def waiting(queue: StudyQueue, offer: WorkerOffer, study_id: str = "wide", owner_id: str | None = None) -> Lease:
    """A new study over two hosts, for which a worker asks its cluster."""
    submit_wide(queue, study_id, owner_id)
    lease = claimed(queue, offer).lease
    assert lease.study_id == study_id
    queue.say_waiting(lease, BUSY, cluster=offer.cluster, can_be_met=True)
    return lease


def claim_of(queue: StudyQueue, offer: WorkerOffer, **limits) -> str | None:
    claim = queue.claim(offer, **limits)
    return None if claim is None else claim.lease.study_id


class TestDraining:
    def test_no_other_study_begins_on_the_cluster(self, queue):
        waiting(queue, worker(queue, "asks"))
        submitted(queue, "narrow")
        other = worker(queue, "other")
        assert claim_of(queue, other) is None
        assert claim_of(queue, worker(queue, "elsewhere", cluster="another")) == "narrow"

    def test_a_worker_without_a_cluster_goes_on(self, queue):
        waiting(queue, worker(queue, "asks"))
        submitted(queue, "narrow")
        assert claim_of(queue, cpu_worker(queue, "alone", host_id="alone")) == "narrow"

    def test_none_begins_between_two_times_that_the_study_is_asked_for(self, queue):
        lease = waiting(queue, worker(queue, "asks"))
        queue.release(lease, StudyState.QUEUED, BUSY)
        submitted(queue, "narrow")
        small = worker(queue, "small")
        assert claim_of(queue, replace(small, max_hosts=1)) is None
        assert claim_of(queue, small) == "wide"

    def test_its_turn_comes_after_the_time_that_the_settings_give(self, engine):
        queue = StudyQueue(engine, hosts_wait_s=600)
        waiting(queue, worker(queue, "asks"))
        other = worker(queue, "other")
        submitted(queue, "before")
        assert claim_of(queue, other) == "before"
        submitted(queue, "after")
        with writing(engine) as session:
            session.get_one(QueueEntryRow, "wide").waits_since -= timedelta(seconds=601)
        assert claim_of(queue, worker(queue, "third")) is None

    def test_a_worker_that_did_not_know_its_cluster_gives_the_hosts_back(self, queue):
        """Its first study tells it; the study waits as before."""
        waiting(queue, worker(queue, "asks"))
        submitted(queue, "narrow")
        new = worker(queue, "new", cluster="")
        lease = claimed(queue, new).lease
        refusal = queue.begin(lease, "new", cluster="shared")
        assert "which are kept free for a study over 2 hosts that has been waiting since" in refusal
        assert {info.worker_id: info.cluster for info in queue.workers()}["new"] == "shared"
        entry = queue.entry("narrow")
        assert (entry.state, entry.num_claims) == (StudyState.QUEUED, 0)

    def test_who_waits_for_hosts_gives_way_to_it_and_it_gives_way_to_nobody(self, queue):
        asks, other = worker(queue, "asks"), worker(queue, "other")
        submitted(queue, "narrow")
        lease = claimed(queue, other).lease
        assert not queue.gives_way(other, without="narrow")
        waiting(queue, asks)
        assert queue.gives_way(other, without="narrow")
        queue.release(lease, StudyState.QUEUED, BUSY)
        assert not queue.gives_way(asks, without="wide")

    def test_those_that_run_go_on(self, queue):
        submitted(queue, "narrow")
        other = worker(queue, "other")
        lease = claimed(queue, other).lease
        assert queue.begin(lease, "other", cluster="shared") == ""
        waiting(queue, worker(queue, "asks"))
        assert queue.begin(lease, "other and third", cluster="shared") == ""
        assert queue.entry("narrow").state is StudyState.RUNNING

    def test_a_study_whose_cluster_is_started_anew_has_hosts_of_the_new_one(self, queue):
        submitted(queue, "narrow")
        lease = claimed(queue, worker(queue, "other")).lease
        assert queue.begin(lease, "other", cluster="shared") == ""
        assert queue.begin(lease, "other again", cluster="anew") == ""
        assert queue.holds_hosts("anew")


class TestEnds:
    """Each ends the draining, and so lets `narrow` begin on another worker of the cluster."""

    @pytest.fixture
    def lease(self, queue) -> Lease:
        lease = waiting(queue, worker(queue, "asks"))
        submitted(queue, "narrow")
        assert claim_of(queue, worker(queue, "other")) is None
        return lease

    def narrow_begins(self, queue: StudyQueue) -> bool:
        lease = claimed(queue, worker(queue, "other")).lease
        return lease.study_id == "narrow" and queue.begin(lease, "other", cluster="shared") == ""

    def test_it_has_its_hosts(self, queue, lease):
        assert queue.begin(lease, "asks and other", cluster="shared") == ""
        assert self.narrow_begins(queue)

    def test_nodes_are_lost_and_those_that_are_left_can_never_give_them(self, queue, lease):
        queue.say_waiting(lease, "one node", cluster="shared", can_be_met=False)
        assert self.narrow_begins(queue)

    def test_nodes_can_never_give_them_to_another_worker(self, queue, lease):
        """Whose own node, the first host there, is larger than the others: it ends nothing."""
        queue.release(lease, StudyState.QUEUED, BUSY)
        other = queue.claim(worker(queue, "other"))
        assert other is not None
        assert other.lease.study_id == "wide"
        queue.say_waiting(other.lease, "one node of that size", cluster="shared", can_be_met=False)
        assert claim_of(queue, worker(queue, "third")) is None
        queue.release(other.lease, StudyState.QUEUED, "one node of that size")
        again = queue.claim(worker(queue, "asks"))
        assert again is not None
        queue.say_waiting(again.lease, "one node", cluster="shared", can_be_met=False)
        assert claim_of(queue, worker(queue, "third")) == "narrow"

    def test_its_cluster_does_not_answer(self, queue, lease):
        queue.say_waiting(lease, "not reached")
        assert self.narrow_begins(queue)

    @pytest.mark.parametrize("held", [True, False])
    @pytest.mark.parametrize("ask", ["cancel", "pause"])
    def test_its_user_wants_it_no_longer(self, queue, lease, held, ask):
        if not held:
            queue.release(lease, StudyState.QUEUED, BUSY)
        getattr(queue, ask)("wide")
        assert self.narrow_begins(queue)
        if ask == "pause" and not held:
            queue.resume("wide")
            submitted(queue, "next")
            assert claim_of(queue, worker(queue, "third"), leaving={"wide"}) == "next", "it waits from now on"

    def test_its_worker_died_until_another_one_asks_for_it(self, engine, queue, lease):
        """The time that it has waited counts."""
        since = waits_since(engine)
        end_lease(engine, "wide")
        with writing(engine) as session:
            session.execute(
                update(WorkerRow)
                .where(WorkerRow.worker_id == "asks")
                .values(heartbeat_at=datetime.now(UTC) - timedelta(hours=1))
            )
        other, third = worker(queue, "other"), worker(queue, "third")
        narrow = queue.claim(other, leaving={"wide"})
        assert narrow is not None
        assert queue.begin(narrow.lease, "other", cluster="shared") == ""
        again = claimed(queue, third).lease
        assert again.study_id == "wide"
        queue.say_waiting(again, BUSY, cluster="shared", can_be_met=True)
        assert waits_since(engine) == since
        submitted(queue, "next")
        assert claim_of(queue, worker(queue, "fourth")) is None

    def test_its_worker_takes_no_further_study(self, queue, lease):
        queue.heartbeat(lease, draining=True)
        assert self.narrow_begins(queue)

    def test_its_worker_fails_before_it_asks_again(self, engine, queue, lease):
        """Its disk is full, for instance; what it has waited counts."""
        since = waits_since(engine)
        queue.release(lease, StudyState.QUEUED, "no space", failed=True)
        narrow = queue.claim(worker(queue, "other"), leaving={"wide"})
        assert narrow is not None
        assert queue.begin(narrow.lease, "other", cluster="shared") == ""
        assert waits_since(engine) == since

    def test_only_others_than_the_services_studies_have_the_hosts(self, engine, queue, lease):
        """Then it waits as long as any other before it goes first again."""
        assert not queue.holds_hosts("shared")
        since = waits_since(engine)
        queue.wait_anew(lease)
        assert waits_since(engine) > since

    def test_it_has_waited_once_and_waits_again(self, engine, queue, lease):
        assert queue.begin(lease, "asks and other", cluster="shared") == ""
        assert queue.holds_hosts("shared")
        assert not queue.holds_hosts("another")
        assert waits_since(engine) is None
        queue.release(lease, StudyState.QUEUED, "a host was lost")
        assert waits_since(engine) is None


def waits_since(engine: Engine) -> datetime | None:
    with writing(engine) as session:
        return session.get_one(QueueEntryRow, "wide").waits_since


class TestOrder:
    def test_who_has_waited_longest_is_first_and_then_the_next(self, queue):
        first, second = worker(queue, "first"), worker(queue, "second")
        submit_wide(queue, "wide-1")
        submit_wide(queue, "wide-2")
        leases = [claimed(queue, offer).lease for offer in (first, second)]
        for lease in leases:
            queue.say_waiting(lease, BUSY, cluster="shared", can_be_met=True)
        assert "which are kept free" in queue.begin(leases[1], "second and first", cluster="shared")
        assert queue.gives_way(second, without="wide-2")
        assert queue.begin(leases[0], "first and second", cluster="shared") == ""
        submitted(queue, "narrow")
        assert claim_of(queue, worker(queue, "third")) is None
        assert queue.begin(leases[1], "second and first", cluster="shared") == ""

    def test_a_user_to_whom_an_administrator_gave_priority_is_not_held_up(self, engine, queue):
        ada, bob, joan = (add_user(engine, name, priority=n) for name, n in (("ada", 0), ("bob", 1), ("joan", 0)))
        asks = worker(queue, "asks")
        waiting(queue, asks, owner_id=ada)
        submitted(queue, "same", joan)
        assert claim_of(queue, worker(queue, "other")) is None
        submitted(queue, "higher", bob)
        assert queue.gives_way(asks, without="wide")
        lease = claimed(queue, worker(queue, "other")).lease
        assert lease.study_id == "higher"
        assert queue.begin(lease, "other", cluster="shared") == ""

    def test_of_two_that_are_due_the_user_with_priority_is_first(self, engine, queue):
        first, second = worker(queue, "first"), worker(queue, "second")
        waiting(queue, first, "wide-1", add_user(engine, "ada"))
        waiting(queue, second, "wide-2", add_user(engine, "bob", priority=1))
        assert queue.gives_way(first, without="wide-1")
        assert not queue.gives_way(second, without="wide-2")

    @pytest.mark.parametrize("limits", [{"max_running": 1}, {"disabled_at": datetime.now(UTC)}])
    def test_whose_user_may_start_none_holds_nobody_up(self, engine, queue, limits):
        ada = add_user(engine, "ada")
        submitted(queue, "running", ada)
        claimed(queue, cpu_worker(queue, "alone", host_id="alone"))
        waiting(queue, worker(queue, "asks"), owner_id=ada)
        submitted(queue, "narrow")
        other = worker(queue, "other")
        assert claim_of(queue, other) is None
        with writing(engine) as session:
            for name, value in limits.items():
                setattr(session.get_one(UserRow, "ada"), name, value)
        assert claim_of(queue, other) == "narrow"


class TestReasons:
    """Words about waiting, as pages and the interface show them."""

    def test_who_goes_first_and_who_waits_for_it(self, queue):
        lease = waiting(queue, worker(queue, "asks"))
        submitted(queue, "narrow")
        worker(queue, "other")
        assert queue.entry("wide").waits_for == (
            f"hosts of the cluster: {BUSY}; the study is next on the cluster, and others wait until it has begun"
        )
        assert queue.entry("narrow").waits_for.startswith(
            "hosts of the cluster, which are kept free for a study over 2 hosts"
        )
        queue.release(lease, StudyState.QUEUED, BUSY)
        assert queue.entry("wide").waits_for == (
            f"a worker whose cluster reserves 2 hosts to be free; last: {BUSY}; "
            "the study is next on the cluster, and others wait until it has begun"
        )

    def test_a_worker_without_a_cluster_may_take_a_narrow_one(self, queue):
        waiting(queue, worker(queue, "asks"))
        submitted(queue, "narrow")
        cpu_worker(queue, "alone", host_id="alone")
        assert queue.entry("narrow").waits_for == "a worker to be free"
        submit_wide(queue, "wide-2")
        assert "kept free for a study over 2 hosts" in queue.entry("wide-2").waits_for
