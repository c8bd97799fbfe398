"""Workers share a cluster; the cluster and the studies are doubles, workers and queue are real."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import TWO_CORES, sample_study
from marked import wait_until

from steptune.service.connections import create_engine_for
from steptune.service.on_ray.hosts import Cluster
from steptune.service.queue import Claim, StudyQueue, WorkerOffer
from steptune.service.settings import Settings
from steptune.service.worker import loop
from steptune.service.worker.keeper import LeaseKeeper
from steptune.service.worker.loop import Worker
from steptune.tuner.records import Study, StudySettings, StudyState

MOST_NARROW = 30
"""Narrow studies that come before the test ends them."""
WAITS_S = 0.01


class Nodes:
    """Hosts of a cluster that are reserved all at once or not at all, as by Ray."""

    def __init__(self, *names: str) -> None:
        self._free = set(names)
        self._lock = threading.Lock()

    @contextmanager
    def reserved(
        self,
        cluster: Cluster,
        study: Study,
        _settings: Settings,
        _level: object,
        _say: Callable[[str], None],
        check: Callable[[], None],
        check_waiting: Callable[[object], None],
        *,
        timeout_s: None,
    ) -> Iterator[tuple[object, Callable[[], None]]]:
        assert timeout_s is None
        while not (taken := self._take(cluster.address, study.settings.num_hosts)):
            check_waiting(SimpleNamespace(lack="the other host is in use", can_be_met=True, cluster="shared"))
            time.sleep(WAITS_S)
        check_waiting(SimpleNamespace(lack="", can_be_met=True, cluster="shared"))
        try:
            yield SimpleNamespace(places=taken[1:]), check
        finally:
            with self._lock:
                self._free.update(taken)

    def _take(self, first: str, number: int) -> list[str]:
        with self._lock:
            if first not in self._free or len(self._free) < number:
                return []
            taken = [first, *sorted(self._free - {first})][:number]
            self._free.difference_update(taken)
            return taken


class Fleet:
    """Workers, each on a host of its own."""

    def __init__(self, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.engine = create_engine_for(url)
        self.queue = StudyQueue(self.engine)
        self.begun: list[str] = []
        self.runs: Callable[[str], None] = lambda _: None
        monkeypatch.setattr(loop, "reserved_hosts", Nodes(*hosts).reserved)
        monkeypatch.setattr(loop, "child_pids", list)
        monkeypatch.setattr(loop, "GIVE_WAY_S", WAITS_S)
        monkeypatch.setattr(loop, "TURN_S", WAITS_S)
        settings = Settings(_env_file=None, database_url=url, data_directory=folder, poll_s=WAITS_S, hosts_wait_s=0.0)
        self._workers = [self._worker(name, settings) for name in hosts]
        threads = [threading.Thread(target=worker.run, name="worker") for worker in self._workers]
        self._threads = dict(zip(hosts, threads, strict=True))

    def _worker(self, host: str, settings: Settings) -> Worker:
        offer = WorkerOffer(
            worker_id=host, name=host, host_id=host, profile=TWO_CORES, cores=(0, 1), max_hosts=2, reserves=True
        )
        cluster = Cluster(address=host, insecure=True, variables={})
        worker = Worker(self.engine, settings, offer, None, cluster=cluster)  # type: ignore[arg-type]

        def run(claim: Claim, keeper: LeaseKeeper) -> StudyState:
            with worker._hosts(claim, claim.study, keeper, lambda _: None):
                self.begun.append(claim.lease.study_id)
                self.runs(claim.lease.study_id)
            return StudyState.COMPLETED

        worker._run = run  # type: ignore[method-assign]
        return worker

    def submit(self, study_id: str, num_hosts: int = 1) -> None:
        settings = StudySettings(num_ranks=num_hosts, num_hosts=num_hosts, device="cpu")
        study = sample_study(study_id=study_id, facts=None, environment=None, settings=settings, message="")
        self.queue.submit(study, owner_id=None)

    def start(self, *hosts: str) -> None:
        for host in hosts:
            self._threads[host].start()

    def close(self) -> None:
        for worker in self._workers:
            worker.stop(within_s=0)
        for thread in self._threads.values():
            if thread.ident is not None:
                thread.join()
        self.engine.dispose()


@pytest.fixture
def fleet(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    fleet = Fleet(database_url, tmp_path / "data", monkeypatch, *request.param)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("fleet", [("one", "two")], indirect=True)
def test_narrow_studies_that_keep_coming_do_not_keep_a_wide_one_out(fleet: Fleet) -> None:
    """The cluster could have run it at any time, had the hosts that became free been left to it."""
    first_two = threading.Barrier(3)

    def run(study_id: str) -> None:
        if study_id in ("narrow-0", "narrow-1"):
            first_two.wait(30)
        if study_id != "wide" and len(fleet.begun) < MOST_NARROW:
            fleet.submit(f"narrow-{len(fleet.begun) + 2}-after-{study_id}")

    fleet.runs = run
    for study_id in ("narrow-0", "narrow-1"):
        fleet.submit(study_id)
    fleet.start("one", "two")
    wait_until(lambda: len(fleet.begun) == 2, "both hosts are in use")
    fleet.submit("wide", num_hosts=2)
    fleet.submit("narrow-2")
    fleet.submit("narrow-3")
    first_two.wait(30)
    wait_until(lambda: fleet.queue.entry("wide").state is StudyState.COMPLETED, "it runs at last")
    assert len(fleet.begun) < MOST_NARROW, fleet.begun


@pytest.mark.parametrize("fleet", [("one", "two", "three")], indirect=True)
def test_a_worker_whose_own_host_is_in_use_leaves_its_study_to_one_that_is_free(fleet: Fleet) -> None:
    """It would keep a study that goes first, and everybody else waiting for that, until its own host is given back."""
    ends = threading.Event()
    fleet.runs = lambda study_id: ends.wait(60) if study_id == "wide" else None
    try:
        fleet.submit("wide", num_hosts=2)
        fleet.start("one")
        wait_until(lambda: fleet.begun == ["wide"], "it has the host of another worker, too")
        fleet.submit("narrow")
        fleet.start("three")
        wait_until(lambda: "the other host is in use" in fleet.queue.entry("narrow").waits_for, "its host is taken")
        fleet.start("two")
        wait_until(lambda: fleet.queue.entry("narrow").state is StudyState.COMPLETED, "it runs on the free host")
        assert fleet.queue.entry("wide").state is StudyState.RUNNING
    finally:
        ends.set()
