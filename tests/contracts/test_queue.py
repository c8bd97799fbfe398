"""The queue behaves alike on SQLite and on PostgreSQL."""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from builders import (
    TWO_CORES,
    sample_decision,
    sample_environment,
    sample_facts,
    sample_hardware,
    sample_recommendation,
    sample_study,
    sample_trial,
)
from marked import wait_until
from msgspec.structs import replace
from sqlalchemy import Engine, and_, func, or_, select, text, update

from steptune.service import advisory_locks
from steptune.service.connections import create_engine_for, reading, writing
from steptune.service.fencing import Lease, database_now
from steptune.service.models import (
    QueueEntryRow,
    ResourceSlotRow,
    StudyRow,
    TrialAttemptRow,
    TrialRow,
    UserRow,
    WorkloadRow,
)
from steptune.service.queue import Claim, Quotas, StudyQueue, WorkerOffer, claims
from steptune.service.queue.claiming import claimable
from steptune.service.queue.usage import usage_by_owner
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import (
    ChoiceError,
    LeaseLostError,
    QuotaExceededError,
    StateConflictError,
    StudyNotFoundError,
)
from steptune.tuner.records import HardwareProfile, StudySettings, StudyState

GPUS = sample_hardware()


@pytest.fixture
def queue(engine) -> StudyQueue:
    return StudyQueue(engine)


def cpu_worker(queue: StudyQueue, name: str = "worker", **changes) -> WorkerOffer:
    """A registered worker with both cores of a host."""
    fields = {"worker_id": name, "name": name, "host_id": "host", "profile": TWO_CORES, "cores": (0, 1), **changes}
    offer = WorkerOffer(**fields)
    queue.register(offer)
    return offer


def gpu_worker(queue: StudyQueue, name: str = "worker", **changes) -> WorkerOffer:
    return cpu_worker(queue, name, **{"profile": GPUS, "gpus": (0, 1), **changes})


def submitted(queue: StudyQueue, study_id: str = "study", owner_id: str | None = None, **requirements):
    study = sample_study(study_id=study_id, facts=None, environment=None, settings=StudySettings(), message="")
    return queue.submit(study, owner_id=owner_id, **requirements)


def claimed(queue: StudyQueue, offer: WorkerOffer) -> Claim:
    claim = queue.claim(offer)
    assert claim is not None
    return claim


def add_user(engine: Engine, name: str, **limits) -> str:
    with writing(engine) as session:
        session.add(UserRow(user_id=name, name=name, scopes="submit", created_at=datetime.now(UTC), **limits))
    return name


def end_lease(engine: Engine, study_id: str = "study") -> None:
    """End a lease as if its worker had been silent for a minute."""
    with writing(engine) as session:
        past = datetime.now(UTC) - timedelta(seconds=1)
        session.execute(update(QueueEntryRow).where(QueueEntryRow.study_id == study_id).values(lease_until=past))


def begun_on(engine: Engine, profile: HardwareProfile, study_id: str = "study") -> None:
    store = SqlStudyStore(engine)
    environment = replace(sample_environment(), hardware=profile)
    store.update_study(replace(store.get_study(study_id), environment=environment))


class TestSubmitting:
    def test_a_submitted_study_waits(self, queue):
        entry = submitted(queue, title="mine", priority=3)
        assert (entry.state, entry.title, entry.priority, entry.version) == (StudyState.QUEUED, "mine", 3, 1)
        assert queue.entry("study") == entry

    def test_the_device_of_the_settings_is_required(self, queue):
        study = sample_study(settings=StudySettings(device="cuda"))
        assert queue.submit(study, owner_id=None).required_device_kind == "cuda"

    @pytest.mark.parametrize(
        "requirements",
        [
            {"required_device_kind": "tpu"},
            {"num_devices": 0},
            {"required_device_kind": "cpu", "num_devices": 2},
            {"required_hardware": " "},
        ],
    )
    def test_what_no_worker_can_ever_have_is_refused(self, queue, requirements):
        with pytest.raises(ChoiceError):
            submitted(queue, **requirements)
        with pytest.raises(StudyNotFoundError):
            queue.entry("study")

    def test_a_user_has_so_many_waiting(self, engine, queue):
        owner = add_user(engine, "ada", max_queued=1)
        submitted(queue, "first", owner)
        with pytest.raises(QuotaExceededError, match="1 studies are already waiting"):
            submitted(queue, "second", owner)

    def test_an_unknown_study_has_no_entry(self, queue):
        for ask in (queue.entry, queue.cancel, queue.pause, queue.resume, queue.delete):
            with pytest.raises(StudyNotFoundError):
                ask("nothing")
        assert queue.entries(["nothing"]) == []


class TestClaiming:
    def test_an_empty_queue_has_nothing(self, queue):
        assert queue.claim(cpu_worker(queue)) is None

    def test_a_claim_is_a_lease_with_all_cores(self, queue):
        submitted(queue)
        claim = claimed(queue, cpu_worker(queue))
        assert (claim.lease.study_id, claim.lease.worker_id, claim.lease.fence) == ("study", "worker", 1)
        assert claim.place == "host core 0,1"
        entry = queue.entry("study")
        assert (entry.state, entry.worker_id, entry.num_claims) == (StudyState.RUNNING, "worker", 1)
        assert queue.workers()[0].study_id == "study"

    def test_a_study_is_claimed_once(self, queue):
        submitted(queue)
        claimed(queue, cpu_worker(queue))
        assert queue.claim(cpu_worker(queue, "other", host_id="elsewhere")) is None

    def test_workers_with_a_core_in_common_exclude_each_other(self, queue):
        for study_id in ("one", "two", "three"):
            submitted(queue, study_id)
        both = cpu_worker(queue, "both")
        first = cpu_worker(queue, "first", cores=(0,))
        second = cpu_worker(queue, "second", cores=(1,))
        claimed(queue, first)
        assert queue.claim(both) is None
        claimed(queue, second)
        queue.release(claimed(queue, cpu_worker(queue, "elsewhere", host_id="other")).lease, StudyState.QUEUED)

    def test_slots_of_a_dead_claim_are_free(self, engine, queue):
        submitted(queue, "one")
        submitted(queue, "two")
        claimed(queue, cpu_worker(queue, "dead", cores=(0,)))
        end_lease(engine, "one")
        assert claimed(queue, cpu_worker(queue, "alive")).lease.fence == 2

    def test_a_wish_between_the_look_of_a_claim_and_its_lock_is_kept(self, postgres_url, monkeypatch):
        """The claim's statement is held up after it has read the rows, until the study is paused."""
        engine = create_engine_for(postgres_url)
        queue = StudyQueue(engine)
        submitted(queue)
        offer = cpu_worker(queue)
        held_up = func.pg_advisory_xact_lock(1).is_not(None)
        monkeypatch.setattr(claims, "claimable", lambda now: and_(claimable(now), held_up))
        waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        with ThreadPoolExecutor(1) as pool, engine.connect() as holder:
            holder.execute(select(func.pg_advisory_xact_lock(1)))
            claim = pool.submit(queue.claim, offer)
            wait_until(lambda: holder.scalar(waiting) == 1, "the claim is held up")
            queue.pause("study")
            holder.rollback()
            assert claim.result() is None
        assert queue.entry("study").state is StudyState.PAUSED
        engine.dispose()

    def test_a_look_at_an_empty_queue_waits_for_no_claim(self, postgres_url):
        """Claims take turns; thousands of idle workers that look would not leave any to them."""
        engine = create_engine_for(postgres_url)
        queue = StudyQueue(engine)
        offer = cpu_worker(queue)
        with ThreadPoolExecutor(1) as pool, engine.connect() as holder:
            holder.execute(select(func.pg_advisory_xact_lock(advisory_locks.CLAIMS)))
            try:
                assert pool.submit(queue.claim, offer).result(timeout=30) is None
            finally:
                holder.rollback()
        engine.dispose()

    def test_many_workers_claim_every_study_once(self, engine, queue):
        """Processes of their own, all at the same time."""
        for number in range(20):
            submitted(queue, f"study-{number:02}")
        url = engine.url.render_as_string(hide_password=False)
        with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = [study_id for ids in pool.map(claim_all, [url] * 4, range(4)) for study_id in ids]
        assert sorted(found) == [f"study-{number:02}" for number in range(20)]


def claim_all(url: str, number: int) -> list[str]:
    engine = create_engine_for(url)
    queue = StudyQueue(engine)
    offer = cpu_worker(queue, f"worker-{number}", host_id=f"host-{number}")
    found = []
    while (claim := queue.claim(offer)) is not None:
        found.append(claim.study.study_id)
        queue.release(claim.lease, StudyState.COMPLETED)
    engine.dispose()
    return found


class TestHardware:
    def test_a_study_goes_to_the_kind_of_device_that_it_needs(self, queue):
        submitted(queue, required_device_kind="cuda")
        cpu = cpu_worker(queue, "cpu")
        assert queue.claim(cpu) is None
        assert queue.entry("study").waits_for == "a worker with a cuda device"
        claim = claimed(queue, gpu_worker(queue, "gpu"))
        assert claim.place == "host core 0,1 cuda 0"

    def test_a_study_gets_as_many_devices_as_it_asked_for(self, queue):
        submitted(queue, num_devices=2, required_device_kind="cuda")
        one = gpu_worker(queue, "one", gpus=(0,), profile=replace(GPUS, devices=GPUS.devices[:1]))
        assert queue.claim(one) is None
        assert "2 cuda devices" in queue.entry("study").waits_for
        assert claimed(queue, gpu_worker(queue, "two")).place == "host core 0,1 cuda 0,1"

    @pytest.mark.parametrize("wanted", ["some device", GPUS.fingerprint])
    def test_hardware_is_named_by_fingerprint_or_part_of_its_label(self, queue, wanted):
        submitted(queue, required_hardware=wanted, num_devices=2)
        assert queue.claim(cpu_worker(queue, "cpu")) is None
        assert queue.claim(gpu_worker(queue, "gpu")) is not None

    def test_absent_hardware_is_waited_for_by_name(self, queue):
        submitted(queue, required_hardware="B300")
        assert queue.claim(cpu_worker(queue)) is None
        assert queue.entry("study").waits_for == "a worker with hardware 'B300'"

    def test_a_study_goes_on_with_the_hardware_on_which_it_was_begun(self, engine, queue):
        submitted(queue)
        begun_on(engine, replace(TWO_CORES, num_cores=64))
        assert queue.claim(cpu_worker(queue)) is None
        assert "64 cores" in queue.entry("study").waits_for
        assert queue.claim(cpu_worker(queue, "large", profile=replace(TWO_CORES, num_cores=64))) is not None

    def test_a_named_part_of_a_label_lets_other_hardware_go_on(self, engine, queue):
        submitted(queue, required_hardware="Some Processor")
        begun_on(engine, replace(TWO_CORES, num_cores=64))
        assert queue.claim(cpu_worker(queue)) is not None

    def test_one_of_two_devices_is_another_profile_than_both(self, engine, queue):
        submitted(queue, required_device_kind="cuda")
        offer = gpu_worker(queue)
        begun_on(engine, offer.profile_for(1))
        assert claimed(queue, offer).place == "host core 0,1 cuda 0"


class TestHosts:
    @pytest.mark.parametrize("level", ["limits", "bubblewrap"])
    def test_a_script_waits_for_a_worker_that_isolates_nothing(self, queue, level):
        """Its view of a folder is a mount."""
        study = sample_study(study_id="study", workload="-- python train.py", settings=StudySettings())
        queue.submit(replace(study, facts=None, environment=None), owner_id=None)
        assert queue.claim(cpu_worker(queue, isolation=level)) is None
        assert "--isolation none" in queue.entry("study").waits_for
        assert claimed(queue, cpu_worker(queue, "other", isolation="none")).study.workload == "-- python train.py"

    def test_a_study_on_several_hosts_waits_for_a_worker_that_has_as_many(self, queue):
        study = sample_study(
            study_id="study", facts=None, environment=None, settings=StudySettings(num_ranks=4, num_hosts=2), message=""
        )
        queue.submit(study, owner_id=None)
        assert queue.claim(cpu_worker(queue, "alone")) is None
        assert queue.entry("study").waits_for == "a worker whose cluster reserves 2 hosts to be free"
        assert claimed(queue, cpu_worker(queue, "with-cluster", max_hosts=2)).study.settings.num_hosts == 2

    def test_devices_of_all_hosts_are_counted(self, engine, queue):
        study = sample_study(
            study_id="study", facts=None, environment=None, settings=StudySettings(num_ranks=4, num_hosts=2), message=""
        )
        queue.submit(study, owner_id=add_user(engine, "ada"))
        lease = claimed(queue, cluster_worker(queue)).lease
        queue.begin(lease, "here and there")
        with writing(engine) as session:
            entry = session.get(QueueEntryRow, "study")
            entry.claimed_at -= timedelta(hours=1)
        with reading(engine) as session:
            running = usage_by_owner(session, database_now(session))["ada"].device_seconds
        queue.release(lease, StudyState.COMPLETED)
        assert running == pytest.approx(7200, rel=0.01)
        assert queue.entry("study").device_seconds == pytest.approx(7200, rel=0.01)

    def test_a_study_of_an_older_version_has_one_host(self, engine, queue):
        submitted(queue)
        with writing(engine) as session:
            row = session.get(StudyRow, "study")
            record = json.loads(row.record)
            del record["settings"]["num_hosts"]
            row.record = json.dumps(record)
        assert queue.claim(cpu_worker(queue)) is not None


class TestReserving:
    """Studies of workers whose devices a cluster reserves after the claim."""

    def test_a_study_that_waits_for_hosts_stays_queued_and_says_why(self, queue):
        over_hosts(queue)
        lease = claimed(queue, cluster_worker(queue)).lease
        queue.say_waiting(lease, "both nodes are busy")
        entry = queue.entry("study")
        assert (entry.state, entry.worker_id, entry.num_claims) == (StudyState.QUEUED, "cluster", 0)
        assert entry.waits_for == "hosts of the cluster: both nodes are busy"
        queue.release(lease, StudyState.QUEUED, "both nodes are busy")
        entry = queue.entry("study")
        assert (entry.state, entry.num_lost, entry.message) == (StudyState.QUEUED, 0, "both nodes are busy")
        assert entry.waits_for.endswith("to be free; last: both nodes are busy")

    def test_who_holds_which_hosts_and_who_waits_is_listed(self, engine, queue):
        ada, bob = add_user(engine, "ada"), add_user(engine, "bob")
        over_hosts(queue, ada)
        submitted(queue, "other", bob)
        lease = claimed(queue, cluster_worker(queue)).lease
        [waits] = queue.under_way(ada, limit=9)
        assert (waits.holds, waits.hosts, waits.num_hosts) == (False, (), 2)
        queue.begin(lease, "here core 0 and there")
        [holds] = queue.under_way(ada, limit=9)
        assert (holds.holds, holds.hosts, holds.waits_for) == (True, ("here", "there"), "")
        assert [entry.study_id for entry in queue.under_way(None, limit=9)] == ["other", "study"]
        assert [entry.study_id for entry in queue.under_way(None, [StudyState.QUEUED], limit=9)] == ["other"]
        assert [entry.study_id for entry in queue.under_way(None, limit=9, after="other")] == ["study"]
        end_lease(engine)
        assert not queue.entry("study").holds

    def test_nobody_else_takes_it_meanwhile(self, queue):
        over_hosts(queue)
        claimed(queue, cluster_worker(queue))
        assert queue.claim(cluster_worker(queue, "other", host_id="elsewhere")) is None

    def test_the_time_before_the_reservation_is_no_device_time(self, engine, queue):
        over_hosts(queue, add_user(engine, "ada"))
        lease = claimed(queue, cluster_worker(queue)).lease
        assert self.usage(engine) == (0, 0)
        assert queue.begin(lease, "here and there") == ""
        entry = queue.entry("study")
        assert (entry.state, entry.place, entry.num_claims) == (StudyState.RUNNING, "here and there", 1)
        with writing(engine) as session:
            session.get(QueueEntryRow, "study").claimed_at -= timedelta(hours=1)
        assert self.usage(engine) == (1, pytest.approx(7200, rel=0.01))
        queue.release(lease, StudyState.QUEUED)
        again = claimed(queue, cluster_worker(queue)).lease
        with writing(engine) as session:
            session.get(QueueEntryRow, "study").queued_at -= timedelta(hours=1)
        queue.release(again, StudyState.QUEUED, "busy")
        assert queue.entry("study").device_seconds == pytest.approx(7200, rel=0.01)

    def test_a_host_that_is_lost_counts_until_then_and_what_replaces_it_from_then_on(self, engine, queue):
        """The hosts that are left are the study's all the time; a place that says nothing is one host."""
        over_hosts(queue, add_user(engine, "ada"))
        lease = claimed(queue, cluster_worker(queue)).lease
        expected = 0
        for place, hours in (("here and there", 2), ("here", 1), ("", 1), ("here and elsewhere", 2)):
            assert queue.begin(lease, place) == ""
            with writing(engine) as session:
                session.get(QueueEntryRow, "study").claimed_at -= timedelta(hours=1)
            expected += 3600 * hours
            assert self.usage(engine) == (1, pytest.approx(expected, rel=0.01))
        queue.release(lease, StudyState.COMPLETED)
        entry = queue.entry("study")
        assert (entry.num_claims, entry.device_seconds) == (1, pytest.approx(expected, rel=0.01))

    def usage(self, engine: Engine) -> tuple[int, float]:
        with reading(engine) as session:
            found = usage_by_owner(session, database_now(session)).get("ada")
        return (0, 0.0) if found is None else (found.running, found.device_seconds)

    def test_hosts_that_come_when_the_user_has_no_more_to_use_are_given_back(self, engine, queue):
        """Another study of theirs began while this one waited."""
        ada = add_user(engine, "ada", max_running=1)
        over_hosts(queue, ada)
        lease = claimed(queue, cluster_worker(queue)).lease
        submitted(queue, "other", ada)
        claimed(queue, cpu_worker(queue, "alone", host_id="elsewhere"))
        assert queue.begin(lease, "here and there") == "its user to have fewer running studies than the limit of 1"
        assert queue.entry("study").state is StudyState.QUEUED

    def test_a_worker_that_dies_while_it_waits_costs_no_attempt(self, engine, queue):
        over_hosts(queue)
        for _ in range(10):
            claimed(queue, cluster_worker(queue))
            end_lease(engine)
        claimed(queue, cluster_worker(queue))
        entry = queue.entry("study")
        assert (entry.state, entry.num_lost, entry.num_claims) == (StudyState.QUEUED, 0, 0)

    def test_a_study_that_waits_is_cancelled(self, queue):
        over_hosts(queue)
        lease = claimed(queue, cluster_worker(queue)).lease
        queue.cancel("study")
        assert queue.heartbeat(lease) == "cancel"
        queue.release(lease, StudyState.QUEUED, "busy")
        assert queue.entry("study").state is StudyState.CANCELLED

    def test_one_that_can_run_is_taken_before_those_that_wait(self, engine, queue):
        """Also of the same user, and although it is younger."""
        ada = add_user(engine, "ada")
        over_hosts(queue, ada)
        offer = cluster_worker(queue)
        claimed(queue, offer)
        assert not queue.gives_way(offer, without="study")
        submitted(queue, "next", ada)
        assert queue.gives_way(offer, without="study")
        assert not queue.gives_way(offer, without="study", leaving={"next"})
        queue.release(Lease(study_id="study", worker_id="cluster", fence=1), StudyState.QUEUED, "busy")
        claim = queue.claim(offer, leaving={"study"})
        assert claim is not None
        assert claim.lease.study_id == "next"

    @pytest.mark.parametrize("kind", [None, "cpu"])
    def test_a_worker_of_a_version_without_hosts_does_not_take_it(self, engine, queue, kind):
        """Its claims ask for the kind of device and the number of devices, and for nothing else."""
        over_hosts(queue, required_device_kind=kind)
        known = QueueEntryRow.required_device_kind
        old_claim = select(QueueEntryRow.study_id).where(or_(known.is_(None), known == "cpu"))
        with reading(engine) as session:
            assert session.scalars(old_claim).all() == []
        assert queue.entry("study").required_device_kind == kind
        assert claimed(queue, cluster_worker(queue)).lease.study_id == "study"

    def test_a_study_over_hosts_of_the_version_before_is_still_taken(self, engine, queue):
        over_hosts(queue)
        with writing(engine) as session:
            session.get(QueueEntryRow, "study").required_device_kind = None
        assert queue.claim(cpu_worker(queue)) is None
        assert claimed(queue, cluster_worker(queue)).lease.study_id == "study"


def over_hosts(queue: StudyQueue, owner_id: str | None = None, **requirements) -> None:
    settings = StudySettings(num_ranks=4, num_hosts=2)
    study = sample_study(study_id="study", facts=None, environment=None, settings=settings, message="")
    queue.submit(study, owner_id=owner_id, **requirements)


def cluster_worker(queue: StudyQueue, name: str = "cluster", **changes) -> WorkerOffer:
    return cpu_worker(queue, name, max_hosts=2, reserves=True, **changes)


class TestTurns:
    def test_the_oldest_study_of_a_user_is_first(self, queue):
        for study_id in ("b", "a", "c"):
            submitted(queue, study_id)
        assert self.order(queue, 3) == ["b", "a", "c"]

    def test_priority_orders_the_studies_of_one_user(self, queue):
        submitted(queue, "low")
        submitted(queue, "high", priority=1)
        assert self.order(queue, 2) == ["high", "low"]

    def test_a_high_priority_does_not_overtake_another_user(self, engine, queue):
        """Whoever has fewer studies running is first."""
        ada, bob = add_user(engine, "ada"), add_user(engine, "bob")
        submitted(queue, "ada-1", ada, priority=9)
        submitted(queue, "ada-2", ada, priority=9)
        submitted(queue, "bob-1", bob)
        assert self.order(queue, 3) == ["ada-1", "bob-1", "ada-2"]

    def test_whom_the_administrator_prefers_is_first(self, engine, queue):
        ada, bob = add_user(engine, "ada"), add_user(engine, "bob", priority=1)
        submitted(queue, "ada-1", ada)
        submitted(queue, "bob-1", bob)
        submitted(queue, "bob-2", bob)
        assert self.order(queue, 3) == ["bob-1", "bob-2", "ada-1"]

    def test_who_used_less_lately_is_first(self, engine, queue):
        ada, bob = add_user(engine, "ada"), add_user(engine, "bob")
        submitted(queue, "old", ada)
        self.used(engine, queue, "old", hours=1)
        submitted(queue, "ada-1", ada)
        submitted(queue, "bob-1", bob)
        assert self.order(queue, 2) == ["bob-1", "ada-1"]

    def test_what_was_begun_is_finished_first(self, queue):
        submitted(queue, "begun")
        claim = claimed(queue, cpu_worker(queue))
        queue.release(claim.lease, StudyState.QUEUED)
        submitted(queue, "urgent", priority=9)
        assert self.order(queue, 2) == ["begun", "urgent"]

    def test_a_user_runs_so_many_at_a_time(self, engine, queue):
        owner = add_user(engine, "ada", max_running=1)
        submitted(queue, "first", owner)
        submitted(queue, "second", owner)
        assert self.order(queue, 1) == ["first"]
        assert queue.claim(cpu_worker(queue, "free", host_id="free")) is None
        assert queue.entry("second").waits_for == "its user to have fewer running studies than the limit of 1"

    def test_a_user_gets_so_many_device_hours(self, engine):
        queue = StudyQueue(engine, quotas=Quotas(max_device_hours=2))
        owner = add_user(engine, "ada")
        submitted(queue, "long", owner)
        self.used(engine, queue, "long", hours=2.5)
        submitted(queue, "next", owner)
        assert queue.claim(cpu_worker(queue)) is None
        assert "below the limit of 2" in queue.entry("next").waits_for

    def test_deleting_a_study_gives_no_device_hours_back(self, engine):
        queue = StudyQueue(engine, quotas=Quotas(max_device_hours=2))
        owner = add_user(engine, "ada")
        for study_id, days in {"old": 31, "long": 0}.items():
            submitted(queue, study_id, owner)
            self.used(engine, queue, study_id, hours=2.5, ended_before=timedelta(days=days))
            queue.delete(study_id)
        submitted(queue, "next", owner)
        assert queue.claim(cpu_worker(queue)) is None
        assert "below the limit of 2" in queue.entry("next").waits_for

    def test_deleting_a_study_does_not_change_whose_turn_it_is(self, engine, queue):
        ada, bob = add_user(engine, "ada"), add_user(engine, "bob")
        submitted(queue, "old", ada)
        self.used(engine, queue, "old", hours=1)
        queue.delete("old")
        submitted(queue, "ada-1", ada)
        submitted(queue, "bob-1", bob)
        assert self.order(queue, 2) == ["bob-1", "ada-1"]

    def test_a_user_of_old_may_start_again(self, engine):
        queue = StudyQueue(engine, quotas=Quotas(max_device_hours=2))
        owner = add_user(engine, "ada")
        submitted(queue, "long", owner)
        self.used(engine, queue, "long", hours=2.5, ended_before=timedelta(days=31))
        submitted(queue, "next", owner)
        assert self.order(queue, 1) == ["next"]

    def test_a_disabled_user_starts_nothing(self, engine, queue):
        submitted(queue, "study", add_user(engine, "ada", disabled_at=datetime.now(UTC)))
        assert queue.claim(cpu_worker(queue)) is None

    @staticmethod
    def order(queue: StudyQueue, count: int) -> list[str]:
        """The studies that workers on as many hosts get."""
        offers = [cpu_worker(queue, f"w{number}", host_id=f"h{number}") for number in range(count)]
        return [claimed(queue, offer).study.study_id for offer in offers]

    @staticmethod
    def used(engine, queue, study_id, *, hours, ended_before=timedelta()) -> None:
        queue.release(claimed(queue, cpu_worker(queue)).lease, StudyState.COMPLETED)
        with writing(engine) as session:
            entry = session.get_one(QueueEntryRow, study_id)
            entry.device_seconds = hours * 3600
            entry.ended_at = datetime.now(UTC) - ended_before


class TestLeases:
    def test_a_heartbeat_extends_a_lease(self, engine, queue):
        submitted(queue)
        lease = claimed(queue, cpu_worker(queue)).lease
        before = queue.entry("study")
        assert StudyQueue(engine, lease_s=90).heartbeat(lease) == ""
        after = queue.entry("study")
        assert after.lease_until > before.lease_until
        assert after.version == before.version, "nothing that a reader asks for has changed"

    def test_another_worker_goes_on_with_a_higher_fence(self, engine, queue):
        submitted(queue)
        old = claimed(queue, cpu_worker(queue, "old")).lease
        end_lease(engine)
        new = claimed(queue, cpu_worker(queue, "new")).lease
        assert new.fence > old.fence
        assert queue.entry("study").num_lost == 1
        for late in (lambda: queue.heartbeat(old), lambda: queue.release(old, StudyState.COMPLETED)):
            with pytest.raises(LeaseLostError):
                late()
        assert queue.heartbeat(new) == ""

    def test_an_ended_lease_is_not_extended(self, engine, queue):
        """Its cores may be another study's by now."""
        submitted(queue)
        lease = claimed(queue, cpu_worker(queue)).lease
        end_lease(engine)
        with pytest.raises(LeaseLostError):
            queue.heartbeat(lease)

    def test_a_late_worker_writes_nothing(self, engine, queue):
        submitted(queue)
        store = SqlStudyStore(engine, lease=claimed(queue, cpu_worker(queue)).lease)
        store.begin_trials([sample_trial(study_id="study")])
        end_lease(engine)
        claimed(queue, cpu_worker(queue, "new"))
        before = engine_rows(engine)
        for late in (
            lambda: store.complete_trials([]),
            lambda: store.set_state("study", StudyState.COMPLETED),
            lambda: store.add_event("study", "late", {}),
            lambda: store.replace_decisions("study", []),
            lambda: store.begin_trials([sample_trial(study_id="study", trial_id="late", sequence=99)]),
            lambda: store.lose_running_trials("study"),
        ):
            with pytest.raises(LeaseLostError):
                late()
        assert engine_rows(engine) == before

    def test_devices_are_counted_while_they_are_held(self, engine, queue):
        submitted(queue, num_devices=2, required_device_kind="cuda")
        lease = claimed(queue, gpu_worker(queue)).lease
        with writing(engine) as session:
            session.get_one(QueueEntryRow, "study").claimed_at = datetime.now(UTC) - timedelta(seconds=100)
        queue.release(lease, StudyState.COMPLETED)
        assert 200 <= queue.entry("study").device_seconds < 260

    def test_the_devices_of_a_lost_claim_count_until_its_lease_ended(self, engine, queue):
        submitted(queue)
        claimed(queue, cpu_worker(queue, "lost"))
        with writing(engine) as session:
            entry = session.get_one(QueueEntryRow, "study")
            entry.claimed_at = datetime.now(UTC) - timedelta(seconds=300)
            entry.lease_until = datetime.now(UTC) - timedelta(seconds=200)
        claimed(queue, cpu_worker(queue, "next"))
        assert queue.entry("study").device_seconds == pytest.approx(100, abs=1)

    def test_what_kills_its_workers_has_failed(self, engine):
        queue = StudyQueue(engine, max_losses=3)
        submitted(queue)
        for _ in range(3):
            claimed(queue, cpu_worker(queue))
            end_lease(engine)
        assert queue.claim(cpu_worker(queue)) is None
        entry = queue.entry("study")
        assert (entry.state, entry.num_claims) == (StudyState.FAILED, 3)
        assert "because 3 workers in a row died" in entry.message
        assert queue.resume("study").num_lost == 0

    def test_a_complete_trial_is_progress(self, engine):
        from builders import sample_result

        queue = StudyQueue(engine, max_losses=2)
        submitted(queue)
        for number in range(4):
            claim = claimed(queue, cpu_worker(queue))
            store = SqlStudyStore(engine, lease=claim.lease)
            trial = sample_trial(study_id="study", trial_id=f"t{number}", sequence=number)
            store.begin_trials([trial])
            store.complete_trials([replace(sample_result(), trial_id=trial.trial_id)])
            end_lease(engine)
        assert queue.entry("study").state is StudyState.RUNNING

    def test_a_trial_does_not_outlast_its_claim(self, engine, queue):
        submitted(queue)
        claim = claimed(queue, cpu_worker(queue))
        SqlStudyStore(engine, lease=claim.lease).begin_trials([sample_trial(study_id="study")])
        queue.release(claim.lease, StudyState.FAILED)
        assert trial_ends(engine) == [("lost", "lost", True)]

    def test_a_trial_does_not_outlast_a_worker_that_died(self, engine, queue):
        submitted(queue)
        claim = claimed(queue, cpu_worker(queue))
        SqlStudyStore(engine, lease=claim.lease).begin_trials([sample_trial(study_id="study")])
        queue.cancel("study")
        end_lease(engine)
        assert queue.claim(cpu_worker(queue)) is None
        assert trial_ends(engine) == [("lost", "lost", True)]

    def test_an_answer_survives_a_worker_that_dies_right_after_it(self, engine, queue):
        submitted(queue)
        claim = claimed(queue, cpu_worker(queue))
        SqlStudyStore(engine, lease=claim.lease).set_state("study", StudyState.COMPLETED)
        end_lease(engine)
        assert queue.claim(cpu_worker(queue)) is None
        entry = queue.entry("study")
        assert (entry.state, entry.worker_id) == (StudyState.COMPLETED, None)
        assert entry.ended_at is not None


def trial_ends(engine: Engine) -> list[tuple[str, str | None, bool]]:
    """State of each trial, with the outcome of its attempt and whether that has ended."""
    query = select(TrialRow.state, TrialAttemptRow.outcome, TrialAttemptRow.ended_at.is_not(None)).join(TrialAttemptRow)
    with reading(engine) as session:
        return [(row[0], row[1], row[2]) for row in session.execute(query)]


def engine_rows(engine: Engine) -> list[tuple]:
    from steptune.service.models import Base

    with reading(engine) as session:
        tables = [table for table in Base.metadata.sorted_tables if table.name != "workers"]
        return [(table.name, *row) for table in tables for row in session.execute(select(table))]


class TestStopping:
    def test_a_waiting_study_is_cancelled_at_once(self, queue):
        submitted(queue)
        entry = queue.cancel("study")
        assert (entry.state, entry.version) == (StudyState.CANCELLED, 2)
        assert entry.ended_at is not None
        assert queue.claim(cpu_worker(queue)) is None

    @pytest.mark.parametrize("request_", ["cancel", "pause"])
    def test_a_running_study_is_asked_to_stop(self, queue, request_):
        submitted(queue)
        lease = claimed(queue, cpu_worker(queue)).lease
        entry = getattr(queue, request_)("study")
        assert (entry.state, entry.requested) == (StudyState.RUNNING, request_)
        assert queue.heartbeat(lease) == request_

    def test_a_study_of_a_dead_worker_is_stopped_at_once(self, engine, queue):
        submitted(queue)
        lease = claimed(queue, cpu_worker(queue)).lease
        end_lease(engine)
        assert queue.pause("study").state is StudyState.PAUSED
        with pytest.raises(LeaseLostError):
            queue.release(lease, StudyState.COMPLETED)

    def test_what_was_asked_of_a_worker_that_died_is_done(self, engine, queue):
        submitted(queue)
        claimed(queue, cpu_worker(queue))
        queue.cancel("study")
        end_lease(engine)
        assert queue.claim(cpu_worker(queue)) is None
        assert queue.entry("study").state is StudyState.CANCELLED

    def test_what_was_asked_of_a_worker_that_died_is_done_by_the_next_wish(self, engine, queue):
        """No worker need be there."""
        submitted(queue)
        claimed(queue, cpu_worker(queue))
        queue.cancel("study")
        end_lease(engine)
        with pytest.raises(StateConflictError, match="is cancelled already"):
            queue.pause("study")
        assert queue.entry("study").state is StudyState.CANCELLED

    def test_a_study_of_a_dead_worker_that_was_asked_to_pause_is_resumed(self, engine, queue):
        submitted(queue)
        claimed(queue, cpu_worker(queue))
        queue.pause("study")
        end_lease(engine)
        assert queue.resume("study").state is StudyState.QUEUED

    @pytest.mark.parametrize(
        ("request_", "state"), [("cancel", StudyState.CANCELLED), ("pause", StudyState.PAUSED), ("", StudyState.QUEUED)]
    )
    def test_without_a_worker_dead_claims_are_ended_too(self, engine, queue, request_, state):
        submitted(queue)
        claimed(queue, cpu_worker(queue))
        if request_:
            getattr(queue, request_)("study")
        queue.bury()
        assert queue.entry("study").state is StudyState.RUNNING, "a living one is left alone"
        end_lease(engine)
        queue.bury()
        entry = queue.entry("study")
        assert (entry.state, entry.num_lost, entry.lease_until) == (state, 1, None)

    def test_a_study_that_has_ended_stays_so(self, engine, queue):
        """Whatever its worker says afterwards: its files could not be kept, or it tells the reason in other words."""
        submitted(queue)
        lease = claimed(queue, cpu_worker(queue)).lease
        SqlStudyStore(engine, lease=lease).set_state("study", StudyState.CANCELLED, "the baseline was not measured")
        events = SqlStudyStore(engine).events("study")
        queue.release(lease, StudyState.QUEUED, "the disk is full", lost=True)
        assert queue.entry("study").state is StudyState.CANCELLED
        assert queue.entry("study").message == "the baseline was not measured"
        assert SqlStudyStore(engine).events("study") == events, "the last one was there with the state"

    def test_a_study_learns_from_those_of_its_owner(self, engine, queue):
        """Answers for another user's model are theirs alone."""
        with writing(engine) as session:
            session.add_all(
                UserRow(user_id=name, name=name, scopes="submit", created_at=datetime.now(UTC))
                for name in ("ada", "bob")
            )
        for name, owner_id in (("adas", "ada"), ("next", "ada"), ("bobs", "bob"), ("nobodys", None)):
            study = sample_study(study_id=name, settings=StudySettings())
            queue.submit(study, owner_id=owner_id)
            store = SqlStudyStore(engine)
            store.set_state(name, StudyState.COMPLETED)
            store.replace_decisions(name, [sample_decision(1, reason=name)])
            store.save_recommendation(sample_recommendation(study_id=name))
        for asking, known in (("next", {"adas", "next"}), ("bobs", {"bobs"}), ("nobodys", {"nobodys"})):
            assert {past.study_id for _, past in store.past_recommendations(asking, "cuda")} == known
            assert {past.reason for past in store.past_decisions(asking, sample_hardware())} == known

    def test_a_study_whose_worker_died_waits(self, engine, queue):
        submitted(queue)
        claimed(queue, cpu_worker(queue))
        queue.leave("worker")
        assert queue.entry("study").waits_for == ""
        end_lease(engine)
        assert "steptune worker" in queue.entry("study").waits_for

    def test_a_paused_study_goes_on_when_resumed(self, queue):
        submitted(queue)
        queue.pause("study")
        assert queue.claim(cpu_worker(queue)) is None
        assert queue.resume("study").state is StudyState.QUEUED
        assert queue.claim(cpu_worker(queue)) is not None

    def test_a_pause_can_be_taken_back(self, queue):
        submitted(queue)
        lease = claimed(queue, cpu_worker(queue)).lease
        queue.pause("study")
        queue.resume("study")
        assert queue.heartbeat(lease) == ""

    @pytest.mark.parametrize("state", [StudyState.QUEUED, StudyState.PAUSED])
    def test_what_was_asked_of_a_worker_that_did_not_hear_it_is_done(self, queue, state):
        submitted(queue)
        lease = claimed(queue, cpu_worker(queue)).lease
        queue.pause("study")
        queue.cancel("study")
        queue.release(lease, state, lost=state is StudyState.QUEUED)
        assert queue.entry("study").state is StudyState.CANCELLED

    def test_a_pause_that_was_taken_back_too_late_for_the_worker_is_none(self, queue):
        submitted(queue)
        lease = claimed(queue, cpu_worker(queue)).lease
        queue.pause("study")
        assert queue.heartbeat(lease) == "pause"
        queue.resume("study")
        queue.release(lease, StudyState.PAUSED)
        assert queue.entry("study").state is StudyState.QUEUED

    def test_an_answer_counts_for_more_than_a_wish(self, queue):
        submitted(queue)
        lease = claimed(queue, cpu_worker(queue)).lease
        queue.cancel("study")
        queue.release(lease, StudyState.COMPLETED)
        assert queue.entry("study").state is StudyState.COMPLETED

    def test_what_was_asked_before_is_no_conflict(self, queue):
        submitted(queue)
        assert queue.pause("study") == queue.pause("study")
        assert queue.cancel("study") == queue.cancel("study")

    def test_what_has_ended_is_not_stopped(self, queue):
        submitted(queue)
        queue.release(claimed(queue, cpu_worker(queue)).lease, StudyState.COMPLETED)
        for ask in (queue.cancel, queue.pause, queue.resume):
            with pytest.raises(StateConflictError, match="completed"):
                ask("study")

    def test_a_cancelled_study_is_not_paused_nor_resumed(self, queue):
        submitted(queue)
        claimed(queue, cpu_worker(queue))
        queue.cancel("study")
        with pytest.raises(StateConflictError, match="about to be cancelled"):
            queue.pause("study")
        with pytest.raises(StateConflictError):
            queue.resume("study")

    def test_a_running_study_is_not_deleted(self, engine, queue):
        submitted(queue)
        claimed(queue, cpu_worker(queue))
        with pytest.raises(StateConflictError, match="cancel it first"):
            queue.delete("study")
        end_lease(engine)
        queue.delete("study")
        with pytest.raises(StudyNotFoundError):
            queue.entry("study")
        with reading(engine) as session:
            assert session.scalars(select(ResourceSlotRow.study_id)).all() == [None, None]

    def test_every_change_of_state_is_an_event(self, engine, queue):
        submitted(queue)
        claim = claimed(queue, cpu_worker(queue))
        queue.pause("study")
        queue.release(claim.lease, StudyState.PAUSED)
        queue.resume("study")
        queue.cancel("study")
        events = [event.data for event in SqlStudyStore(engine).events("study")]
        states = [event["state"] for event in events if "state" in event]
        assert states == ["queued", "running", "paused", "queued", "cancelled"]
        assert {"request": "pause"} in events


class TestCommandLine:
    def test_a_study_in_hand_is_not_run_beside_the_queue(self, engine, queue):
        submitted(queue)
        with pytest.raises(StateConflictError, match="queued in the service"):
            queue.take_over("study")
        claimed(queue, cpu_worker(queue))
        with pytest.raises(StateConflictError, match="running in the service"):
            queue.take_over("study")
        end_lease(engine)
        with pytest.raises(StateConflictError):
            queue.take_over("study")

    def test_a_study_that_a_worker_is_just_ending_is_not_taken_over(self, engine, queue):
        submitted(queue)
        claim = claimed(queue, cpu_worker(queue))
        SqlStudyStore(engine, lease=claim.lease).set_state("study", StudyState.CANCELLED)
        with pytest.raises(StateConflictError, match="cancelled in the service"):
            queue.take_over("study")
        end_lease(engine)
        queue.take_over("study")
        assert queue.claim(cpu_worker(queue)) is None, "what a dead worker held is no claim any more"

    def test_a_stopped_study_may_go_on_in_a_command_and_then_no_worker_takes_it(self, engine, queue):
        submitted(queue)
        before = queue.pause("study").version
        queue.take_over("study")
        assert (queue.entry("study").state, queue.entry("study").version) == (StudyState.RUNNING, before + 1)
        assert queue.claim(cpu_worker(queue)) is None
        for ask in (queue.cancel, queue.pause, queue.delete):
            with pytest.raises(StateConflictError, match="run by a `steptune` command"):
                ask("study")
        with pytest.raises(StateConflictError, match="is running"):
            queue.resume("study")
        queue.take_over("study")

    def test_a_study_that_was_resumed_meanwhile_stays_the_queues(self, queue):
        submitted(queue)
        queue.pause("study")
        queue.resume("study")
        with pytest.raises(StateConflictError, match="queued in the service"):
            queue.take_over("study")

    def test_a_study_of_the_command_line_is_not_the_queues(self, engine, queue):
        SqlStudyStore(engine).create_study(sample_study(study_id="mine", state=StudyState.RUNNING))
        queue.take_over("mine")
        assert queue.claim(cpu_worker(queue)) is None


class TestWorkers:
    def test_workers_say_what_they_have(self, queue):
        gpu_worker(queue, isolation="limits", version="0.1.0")
        (worker,) = queue.workers()
        assert (worker.state, worker.device_kind, worker.hardware_label) == ("idle", "cuda", GPUS.label)
        assert (worker.num_devices, worker.isolation, worker.version) == (2, "limits", "0.1.0")

    def test_a_silent_worker_is_gone(self, engine, queue):
        cpu_worker(queue)
        assert StudyQueue(engine, lease_s=-1).workers()[0].state == "gone"

    def test_a_worker_that_drains_says_so_with_its_heartbeats(self, queue):
        submitted(queue, "running")
        submitted(queue, "waiting")
        lease = claimed(queue, cpu_worker(queue)).lease
        queue.heartbeat(lease)
        assert queue.workers()[0].state == "busy"
        assert queue.entry("waiting").waits_for == "a worker to be free"
        queue.heartbeat(lease, draining=True)
        assert queue.workers()[0].state == "draining"
        assert "steptune worker" in queue.entry("waiting").waits_for

    def test_a_forgotten_worker_has_to_register_again(self, queue):
        assert not queue.beat("unknown", "idle")
        cpu_worker(queue)
        assert queue.beat("worker", "draining")
        assert queue.workers()[0].state == "draining"

    def test_without_workers_a_study_says_how_to_start_one(self, queue):
        assert "steptune worker" in submitted(queue).waits_for
        cpu_worker(queue)
        assert queue.entry("study").waits_for == "a worker to be free"
        queue.leave("worker")
        assert "steptune worker" in queue.entry("study").waits_for


def test_a_change_of_state_leaves_what_other_studies_share(engine, queue):
    """The workload and the hardware stay as they were last inspected, by whichever study."""
    store = SqlStudyStore(engine)
    older, newer = sample_facts(), replace(sample_facts(), name="newer")
    for study_id, facts in (("old", older), ("new", newer)):
        submitted(queue, study_id)
        store.update_study(sample_study(study_id=study_id, facts=facts, state=StudyState.QUEUED))
    store.set_state("old", StudyState.PAUSED)
    queue.cancel("old")
    with reading(engine) as session:
        assert session.scalars(select(WorkloadRow.name)).all() == ["newer"]
    assert store.get_study("old") == sample_study(
        study_id="old", facts=older, state=StudyState.CANCELLED, message="", settings=StudySettings()
    )
