"""Work of a worker around its studies; the studies themselves are made up."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from builders import TWO_CORES, sample_study
from msgspec.structs import replace
from sqlalchemy import Engine

from steptune.service.access.users import UserStore
from steptune.service.connections import create_engine_for, writing
from steptune.service.fencing import Lease
from steptune.service.models import QueueEntryRow, WorkerRow
from steptune.service.on_ray import hosts as on_ray
from steptune.service.on_ray.messages import ReservationRequest, Waiting
from steptune.service.queue import Claim, StudyQueue, WorkerOffer
from steptune.service.settings import Settings
from steptune.service.settings.scopes import Scope
from steptune.service.worker import loop
from steptune.service.worker.keeper import LeaseKeeper
from steptune.service.worker.loop import Worker
from steptune.tuner.errors import (
    HostsUnavailableError,
    IsolationUnavailableError,
    RunnerError,
    StorageFullError,
    StoreError,
    StoreUnavailableError,
)
from steptune.tuner.records import StudySettings, StudyState
from steptune.tuner.search.view import StudyInterrupt

OFFER = WorkerOffer(worker_id="worker", name="worker", host_id="host", profile=TWO_CORES, cores=(0, 1))
Run = Callable[..., StudyState]


class Site:
    """A worker that ends once it has claimed so many times, by a clock that goes on only as it waits."""

    def __init__(self, engine: Engine, settings: Settings, monkeypatch) -> None:
        self.engine = engine
        self.queue = StudyQueue(engine, max_losses=3)
        self.now_s = 1e6
        self.claimed_s: list[float] = []
        self.worker = Worker(engine, settings, OFFER, None, once=True)  # type: ignore[arg-type]
        monkeypatch.setattr(loop, "now_s", lambda: self.now_s)
        monkeypatch.setattr("steptune.service.worker.rests.now_s", lambda: self.now_s)
        monkeypatch.setattr("steptune.service.worker.waits.now_s", lambda: self.now_s)
        monkeypatch.setattr(loop, "child_pids", list)
        monkeypatch.setattr(loop.time, "sleep", self.pass_time)
        monkeypatch.setattr("steptune.service.worker.keeper.now_s", lambda: self.now_s)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def work(self, run: Run, *, claims: int = 100) -> None:
        """Runs studies by `run` until there is none, or until so many claims were made."""

        def counted(*arguments: object) -> StudyState:
            self.claimed_s.append(self.now_s)
            if len(self.claimed_s) == claims:
                self.worker.stop(within_s=0)
            return run(*arguments)

        self.worker._run = counted  # type: ignore[method-assign]
        self.worker.run()

    @property
    def pauses_s(self) -> list[float]:
        return [round(after - before) for before, after in pairwise(self.claimed_s)]


@pytest.fixture
def site(sqlite_url: str, tmp_path, monkeypatch) -> Iterator[Site]:
    engine = create_engine_for(sqlite_url)
    settings = Settings(_env_file=None, database_url=sqlite_url, data_directory=tmp_path / "data", max_losses=3)
    yield Site(engine, settings, monkeypatch)
    engine.dispose()


def submitted(queue: StudyQueue, study_id: str = "study", owner_id: str | None = None) -> None:
    study = sample_study(study_id=study_id, facts=None, environment=None, settings=StudySettings(), message="")
    queue.submit(study, owner_id=owner_id)


def failing(error: Exception) -> Run:
    def run(*_: object) -> StudyState:
        raise error

    return run


class TestFailing:
    @pytest.mark.parametrize(
        "error",
        [StorageFullError("full"), StoreUnavailableError("not reached"), OSError(28, "No space left on device")],
    )
    def test_what_passes_costs_no_study_anything(self, site: Site, error: Exception) -> None:
        submitted(site.queue)
        site.work(failing(error), claims=8)
        entry = site.queue.entry("study")
        assert (entry.state, entry.num_lost) == (StudyState.QUEUED, 0)
        assert site.pauses_s == [2, 4, 8, 16, 32, 60, 60]

    @pytest.mark.parametrize(
        "error",
        [RunnerError("no server"), IsolationUnavailableError("no namespaces"), StoreError("gone"), KeyError("bug")],
    )
    def test_what_does_not_pass_ends_a_study_after_several_tries(self, site: Site, error: Exception) -> None:
        submitted(site.queue)
        site.work(failing(error))
        entry = site.queue.entry("study")
        assert (entry.state, entry.num_claims) == (StudyState.FAILED, 3)
        assert "because 3 workers in a row died" in entry.message
        assert site.pauses_s == [2, 4]

    def test_a_success_ends_the_pauses(self, site: Site) -> None:
        for number in range(4):
            submitted(site.queue, f"study-{number}")
        errors: Iterator[Exception | None] = iter(
            [StorageFullError("full"), None, None, StorageFullError("full"), None, None]
        )

        def run(*_: object) -> StudyState:
            error = next(errors)
            if error is not None:
                raise error
            return StudyState.COMPLETED

        site.work(run)
        assert site.pauses_s == [2, 0, 0, 2, 0]

    @pytest.fixture
    def users(self, site: Site) -> list[str]:
        return [UserStore(site.engine).create(name, {Scope.SUBMIT}).user_id for name in ("ada", "grace", "joan")]

    def test_who_kills_their_own_trials_lets_nobody_else_wait(self, site: Site, users: list[str]) -> None:
        """The pauses of one user's studies are theirs."""
        begun: list[tuple[str, float]] = []

        def run(claim: Claim, *_: object) -> StudyState:
            begun.append((claim.lease.study_id, site.now_s))
            if claim.lease.study_id == "killer":
                if len(begun) == 3:
                    submitted(site.queue, "late", users[1])
                raise RunnerError("the trial server exited with status -9")
            return StudyState.COMPLETED

        submitted(site.queue, "killer", users[0])
        submitted(site.queue, "early", users[1])
        site.work(run)
        at = {study_id: seconds - begun[0][1] for study_id, seconds in reversed(begun)}
        assert at["killer"] == 0
        assert at["early"] == pytest.approx(0, abs=0.1)
        assert at["late"] == pytest.approx(2, abs=0.3), begun
        assert [study_id for study_id, _ in begun].count("killer") == 3

    def test_where_several_users_fail_the_machine_ails_and_takes_nothing(self, site: Site, users: list[str]) -> None:
        for number, user in enumerate(users):
            submitted(site.queue, f"study-{number}", user)
        site.work(failing(StorageFullError("full")), claims=3)
        assert site.pauses_s == [0, 2]

    def test_a_pause_ends_when_the_worker_shall(self, site: Site, monkeypatch) -> None:
        submitted(site.queue)

        def told(seconds: float) -> None:
            site.pass_time(seconds)
            site.worker.stop(within_s=0)

        monkeypatch.setattr(loop.time, "sleep", told)
        began_s = site.now_s
        site.work(failing(StorageFullError("full")))
        assert site.now_s - began_s == pytest.approx(loop.LOOK_S)

    def test_a_worker_that_rests_is_alive(self, site: Site) -> None:
        """It says so as often as one that waits."""
        submitted(site.queue)
        beats: list[float] = []
        beat = site.worker._queue.beat
        site.worker._queue.beat = lambda *given: beats.append(site.now_s) or beat(*given)  # type: ignore
        site.work(failing(StorageFullError("full")), claims=7)
        assert max(after - before for before, after in pairwise(beats)) < 15


class TestPolling:
    @pytest.mark.parametrize(("num_idle", "poll_s"), [(1, 1.0), (100, 5.0), (10_000, loop.LONGEST_POLL_S)])
    def test_many_idle_workers_look_no_more_often_together(self, site: Site, num_idle: int, poll_s: float) -> None:
        site.queue.register(OFFER)
        site.worker._queue.num_idle = lambda: num_idle  # type: ignore[method-assign]
        site.worker._beat()
        assert site.worker._poll_s == poll_s

    def test_those_that_are_busy_or_silent_do_not_count(self, site: Site) -> None:
        for name in ("idle", "busy", "silent"):
            site.queue.register(replace(OFFER, worker_id=name))
        site.queue.beat("busy", "busy")
        with writing(site.engine) as session:
            session.get_one(WorkerRow, "silent").heartbeat_at -= timedelta(hours=1)
        assert site.queue.num_idle() == 1


class TestHousekeeping:
    @pytest.fixture
    def times_s(self, site: Site, monkeypatch) -> list[float]:
        """When it was done; each time takes longer than a lease lasts."""
        times_s: list[float] = []

        def slow(*_: object) -> None:
            times_s.append(site.now_s)
            site.pass_time(600)

        monkeypatch.setattr(loop, "keep_house", slow)
        site.worker._house_at_s = site.now_s
        return times_s

    def test_it_is_done_when_there_is_nothing_else_to_do(self, site: Site, times_s: list[float]) -> None:
        submitted(site.queue)
        site.work(lambda *_: site.pass_time(5) or StudyState.COMPLETED)
        assert site.queue.entry("study").state is StudyState.COMPLETED
        assert times_s == [site.claimed_s[0] + 5]

    def test_workers_that_start_together_do_it_at_different_times(self, site: Site) -> None:
        starts = {Worker(site.engine, site.worker._settings, OFFER, None)._house_at_s for _ in range(20)}  # type: ignore[arg-type]
        assert len(starts) > 15
        assert all(site.now_s <= start <= site.now_s + loop.HOUSE_S for start in starts)

    def test_a_worker_that_is_never_idle_does_it_at_last_and_the_next_claim_is_fresh(
        self, site: Site, times_s: list[float]
    ) -> None:
        for study_id in ("first", "second"):
            submitted(site.queue, study_id)

        def run(*_: object) -> StudyState:
            if not times_s:
                site.worker._house_at_s = site.now_s - loop.HOUSE_LATE_S
            return StudyState.COMPLETED

        site.work(run, claims=2)
        assert site.claimed_s == [times_s[0], times_s[0] + 600]
        entries = site.queue.entries(["first", "second"])
        assert [(entry.state, entry.num_claims) for entry in entries] == [(StudyState.COMPLETED, 1)] * 2


class TestWaitingForHosts:
    """Studies on a cluster that may have no hosts."""

    @pytest.fixture(autouse=True)
    def cluster(self, site: Site) -> None:
        offer = replace(OFFER, max_hosts=2, reserves=True)
        site.worker = Worker(site.engine, site.worker._settings, offer, None, once=True)  # type: ignore[arg-type]

    def test_a_busy_cluster_is_no_loss_however_long_it_is_busy(self, site: Site) -> None:
        submitted(site.queue)
        site.work(failing(HostsUnavailableError("both nodes are busy")), claims=20)
        entry = site.queue.entry("study")
        assert (entry.state, entry.num_lost, entry.num_claims) == (StudyState.QUEUED, 0, 0)
        assert entry.message == "both nodes are busy"
        assert entry.device_seconds == 0

    def test_others_run_meanwhile_and_those_that_wait_take_turns(self, site: Site) -> None:
        for study_id in ("wide", "wider", "small"):
            submitted(site.queue, study_id)
        begun: list[str] = []

        def run(claim: Claim, *_: object) -> StudyState:
            begun.append(claim.lease.study_id)
            if claim.lease.study_id == "small":
                return StudyState.COMPLETED
            raise HostsUnavailableError("busy")

        site.work(run, claims=7)
        assert begun == ["wide", "wider", "small", "wide", "wider", "wide", "wider"]

    def test_one_that_waits_gives_way_to_one_that_can_run(self, site: Site) -> None:
        submitted(site.queue, "wide")
        site.queue.register(site.worker._offer)
        claim = site.queue.claim(site.worker._offer)
        assert claim is not None
        site.worker._give_way(claim, "busy")
        site.pass_time(loop.GIVE_WAY_S)
        submitted(site.queue, "small")
        with pytest.raises(HostsUnavailableError, match="busy"):
            site.worker._give_way(claim, "busy")

    @pytest.fixture
    def asked(self, site: Site) -> Claim:
        """A study that has waited long for hosts of a cluster, and is asked for."""
        submitted(site.queue, "wide")
        offer = replace(site.worker._offer, cluster="shared")
        site.worker._offer = offer
        site.queue.register(offer)
        claim = site.queue.claim(offer)
        assert claim is not None
        site.queue.say_waiting(claim.lease, "busy", cluster="shared", can_be_met=True)
        with writing(site.engine) as session:
            session.get_one(QueueEntryRow, "wide").waits_since -= timedelta(hours=1)
        site.worker._alone_at_s = site.now_s
        submitted(site.queue, "small")
        return claim

    def test_one_that_waits_long_gives_way_no_more(self, site: Site, asked: Claim) -> None:
        site.worker._give_way(asked, "busy")

    def test_one_whose_hosts_none_of_the_services_studies_has_does_again(self, site: Site, asked: Claim) -> None:
        """Other users of the cluster may keep them: nobody knows for how long."""
        site.pass_time(loop.ALONE_S)
        with pytest.raises(HostsUnavailableError, match="busy"):
            site.worker._give_way(asked, "busy")

    def test_as_long_as_one_of_them_has_some_it_does_not(self, site: Site, asked: Claim) -> None:
        other = replace(site.worker._offer, worker_id="other", host_id="other", cluster="")
        site.queue.register(other)
        claim = site.queue.claim(other)
        assert claim is not None
        assert site.queue.begin(claim.lease, "other") == ""
        site.queue.register(replace(other, cluster="shared"))
        site.queue.heartbeat(claim.lease)
        submitted(site.queue, "next")
        for _ in range(3):
            site.pass_time(loop.ALONE_S)
            site.worker._give_way(asked, "busy")

    def test_one_whose_cluster_does_not_answer_lets_others_begin(self, site: Site, asked: Claim) -> None:
        site.queue.release(asked.lease, StudyState.QUEUED, "busy")
        site.work(failing(HostsUnavailableError("not reached")), claims=1)
        offer = replace(site.worker._offer, worker_id="other", host_id="other")
        site.queue.register(offer)
        claim = site.queue.claim(offer, leaving={"wide"})
        assert claim is not None
        assert claim.lease.study_id == "small"


class TestHostsThatARayClusterReserves:
    """Reservation by a cluster that has none to give."""

    @pytest.fixture
    def asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Where the cluster keeps what it was asked for."""
        said = msgspec.json.encode(Waiting(text="none is free", can_be_met=True, cluster="head")).decode()
        program = (
            f"import sys; open({str(tmp_path / 'asked')!r}, 'w').write(input()); print({said!r}, flush=True); input()"
        )
        monkeypatch.setattr(on_ray, "_COMMAND", (sys.executable, "-c", program))
        return tmp_path / "asked"

    def test_a_worker_that_shall_end_waits_for_none_of_them(self, site: Site, asked: Path, tmp_path: Path) -> None:
        """No trial runs that it could let end; and it asks for devices that are its own, whatever Ray's node has."""
        keeper = LeaseKeeper(
            site.queue,
            Lease(study_id="study", worker_id="worker", fence=1),
            lease_s=60.0,
            heartbeat_s=10.0,
            claimed_s=site.now_s,
            kill=lambda: None,
        )
        study = replace(sample_study(study_id="study", settings=StudySettings()), directory=str(tmp_path))
        cluster = on_ray.Cluster(address="auto", insecure=True, variables={})
        worker = Worker(site.engine, Settings(_env_file=None), OFFER, None, cluster=cluster)  # type: ignore[arg-type]

        def say(text: str) -> None:
            assert text == "waiting for Ray: none is free"
            keeper.drain(site.now_s + 300)

        claim = Claim(
            lease=keeper._lease, study=study, owner_id=None, source=None, other_hardware=False, slots=(), place=""
        )
        with pytest.raises(StudyInterrupt) as interrupt, worker._hosts(claim, study, keeper, say):
            pass
        assert interrupt.value.state is StudyState.QUEUED
        assert msgspec.json.decode(asked.read_bytes(), type=ReservationRequest).device == "cpu"


class TestHostThatIsLost:
    """While a study over two hosts of a cluster runs."""

    def test_it_counts_no_longer_until_it_is_replaced(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = StudySettings(num_ranks=4, num_hosts=2)
        study = sample_study(study_id="study", facts=None, environment=None, settings=settings, message="")
        site.queue.submit(study, owner_id=None)
        offer = replace(OFFER, max_hosts=2, reserves=True)
        site.queue.register(offer)
        claim = site.queue.claim(offer)
        assert claim is not None
        hosts = SimpleNamespace(places=["other core 0"])
        checks: list[Callable[[object], None]] = []

        @contextmanager
        def reserved(*arguments: object, **_: object) -> Iterator[tuple[object, None]]:
            checks.append(arguments[-1])  # type: ignore[arg-type]
            yield hosts, None

        monkeypatch.setattr(loop, "reserved_hosts", reserved)
        cluster = on_ray.Cluster(address="auto", insecure=True, variables={})
        worker = Worker(site.engine, Settings(_env_file=None), offer, None, cluster=cluster)  # type: ignore[arg-type]
        keeper = LeaseKeeper(
            site.queue,
            claim.lease,
            lease_s=60.0,
            heartbeat_s=10.0,
            claimed_s=site.now_s,
            kill=lambda: None,
        )
        held = []
        with worker._hosts(claim, study, keeper, print):
            for places in (["other core 0"], [], ["third core 0"]):
                hosts.places = places
                checks[0](SimpleNamespace(lack="one is lost", can_be_met=True, cluster="head"))
                held.append(site.queue.entry("study").hosts[1:])
            checks[0](SimpleNamespace(lack="", can_be_met=False, cluster=""))
        assert held == [("other",), (), ("third",)]
        assert worker._offer.cluster == "head", "it stays known while it does not answer"
        assert site.queue.entry("study").num_claims == 1
