"""Studies on hosts that a Ray cluster reserves; nodes are processes of this machine."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from host_networks import two_hosts
from marked import wait_until
from ray_clusters import ROOT, Cluster, ray_cluster, reservation
from sites import LEASE_S, QUICK, WORKLOAD, Site

from steptune.service.progress import EVENT
from steptune.service.queue import StudyQueue
from steptune.service.submission import new_study
from steptune.tuner.errors import RunnerError
from steptune.tuner.records import FailureKind, Recommendation, StudySettings, StudyState, TrialResult, new_id

PLACED = f"{ROOT / 'tests/workloads/placed.py'}:Placed"
LARGE_TABLE = f"{ROOT / 'benchmarks/workloads/large_table.py'}:LargeTable"
SHORT = ("--budget", "3m", "--trials", "1", "--only", "ddp_buckets", "--foreign-load", "100", "--isolation", "none")
"""The baseline alone: its trial runs on all hosts."""
TWO_HOSTS = ("--num-hosts", "2", "--ranks", "4", "--runner", "ray")
AGENT = "steptune.service.on_ray.agent"
HOLDER = "steptune.service.on_ray.reservation"

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


class Command:
    """`steptune …` on the head of a cluster, with its output in a file."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self.folder = folder
        self.process = process
        self.log = log

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_until(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def end(self, seconds: float) -> int:
        self.wait_until(lambda: self.process.poll() is not None, seconds)
        return self.process.returncode

    def all(self, query: str) -> list[tuple[str, ...]]:
        database = sqlite3.connect(self.folder / "steptune.db")
        try:
            return database.execute(query).fetchall()
        finally:
            database.close()

    def results(self) -> list[TrialResult]:
        rows = self.all("SELECT result FROM trials WHERE result IS NOT NULL")
        return [msgspec.json.decode(record, type=TrialResult) for (record,) in rows]

    def holder(self) -> psutil.Process:
        """The process that holds the reservation."""
        [found] = [child for child in psutil.Process(self.process.pid).children() if HOLDER in child.cmdline()]
        return found


@contextmanager
def steptune(
    cluster: Cluster, folder: Path, *arguments: str, within: Sequence[str] = (), **variables: str
) -> Iterator[Command]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("STEPTUNE_", "RAY_"))},
        **cluster.variables,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **variables,
    }
    log = folder / "output.log"
    with log.open("w") as output:
        command = [*within, sys.executable, "-m", "steptune", *arguments, "--address", cluster.address]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Command(folder, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def left_behind(folder: Path) -> list[list[str]]:
    """Processes of Steptune that work in a folder, or for a study there."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            is_ours = any("steptune" in word for word in line)
            if is_ours and (str(folder) in " ".join(line) or process.cwd() == str(folder)):
                found.append(line)
        except psutil.Error:
            continue
    return found


def test_a_study_runs_its_ranks_on_both_hosts_of_a_reservation(tmp_path: Path) -> None:
    with two_hosts("500mbit", needed_in_ci=True) as networks, ray_cluster(2, 2, networks=networks) as cluster:
        within = ("nsenter", f"--net={networks[0]}", "--")
        with steptune(
            cluster, tmp_path, "tune", PLACED, *SHORT, *TWO_HOSTS, within=within, GLOO_SOCKET_IFNAME="link0"
        ) as command:
            assert command.end(280) == 0, command.output
        agents = [process for process in cluster.processes() if AGENT in process.cmdline()]
        names = [str(network.readlink()) for network in networks]
    [(record, state)] = command.all("SELECT record, state FROM studies")
    environment = msgspec.json.decode(record)["environment"]
    assert state == "completed"
    assert (environment["num_ranks"], environment["num_hosts"]) == (4, 2)
    assert environment["topology"]["host_of_rank"] == [0, 0, 1, 1]
    assert environment["topology"]["between"]["kind"] == "network"
    logs = [path.read_text() for path in (tmp_path / ".steptune").glob("studies/*/logs/*.log")]
    assert {line for log in logs for line in log.splitlines() if line.startswith("rank ")} == {
        f"rank {2 * host + local} local {local} in {name}" for host, name in enumerate(names) for local in (0, 1)
    }
    assert not agents
    assert not list((tmp_path / ".steptune" / "hosts").iterdir())
    token = cluster.variables["RAY_AUTH_TOKEN"].encode()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and token in path.read_bytes()]


@pytest.mark.parametrize(
    ("lost", "trials"),
    [
        ("node", "1"),
        *(pytest.param(lost, "3", marks=pytest.mark.soak) for lost in ("node", "reservation", "cluster")),
    ],
)
def test_what_is_lost_in_the_middle_is_replaced_and_only_the_trial_that_ran_is_repeated(
    tmp_path: Path, lost: str, trials: str
) -> None:
    """A node that dies is replaced by Ray. A reservation that is lost, by itself or with the cluster's head, is asked
    for once more, of the cluster that is at the address then.
    """
    with ray_cluster(2, 2, 2) as cluster:
        with steptune(cluster, tmp_path, "tune", PLACED, *SHORT, "--trials", trials, *TWO_HOSTS) as command:
            command.wait_until(lambda: "] baseline" in command.output, 100)
            if lost == "node":
                [victim] = [node for node in cluster.nodes if any(AGENT in p.cmdline() for p in node.processes())]
                victim.kill()
            elif lost == "reservation":
                command.holder().kill()
            else:
                cluster.close()
                cluster.start()
            assert command.end(280) == 0, command.output
        agents = [process for process in cluster.processes() if AGENT in process.cmdline()]
    [(state,)] = command.all("SELECT state FROM studies")
    assert state == "completed"
    assert command.output.count("reserved by Ray") == 2, command.output
    results = command.results()
    assert all(result.ok for result in results)
    [repeated] = [result for result in results if result.repeated]
    assert [attempt.failure.kind for attempt in repeated.repeated] == [FailureKind.INFRASTRUCTURE]
    assert not agents
    assert not left_behind(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_over_a_slow_link_two_levels_are_recommended_although_a_node_dies_in_the_middle(tmp_path: Path) -> None:
    """The model trains. The trials that ran are repeated on the node in its place, and no other is. The budget is
    for machines that others load.
    """
    asked = ("tune", LARGE_TABLE, "--budget", "10m", "--trials", "4", "--only", "hierarchical_allreduce")
    options = ("--foreign-load", "1000", "--isolation", "none", *TWO_HOSTS)
    with (
        two_hosts("500mbit", needed_in_ci=True, num_hosts=3) as networks,
        ray_cluster(2, 2, 2, networks=networks) as cluster,
    ):
        within = ("nsenter", f"--net={networks[0]}", "--")
        with steptune(cluster, tmp_path, *asked, *options, within=within, GLOO_SOCKET_IFNAME="link0") as command:
            command.wait_until(lambda: {"completed", "running"} <= set(trial_states(command)), 300)
            [victim] = [node for node in cluster.nodes if any(AGENT in p.cmdline() for p in node.processes())]
            victim.kill()
            assert command.end(800) == 0, command.output
        agents = [process for process in cluster.processes() if AGENT in process.cmdline()]
    [(record,)] = command.all("SELECT record FROM recommendations")
    answer = msgspec.json.decode(record, type=Recommendation)
    assert answer.candidate.choices == {"hierarchical_allreduce": {"levels": 2}}, command.output
    assert answer.gain is not None
    assert answer.gain.interval.low > 1
    assert set(trial_states(command)) == {"completed"}
    lost = [attempt.failure.kind for result in command.results() for attempt in result.repeated or ()]
    assert lost
    assert set(lost) == {FailureKind.INFRASTRUCTURE}
    assert command.output.count("reserved by Ray") == 2, command.output
    assert not agents
    assert not left_behind(tmp_path)


def trial_states(command: Command) -> list[str]:
    """States of the study's trials, in their order; none while there is no database."""
    try:
        return [state for (state,) in command.all("SELECT state FROM trials ORDER BY sequence")]
    except sqlite3.OperationalError:
        return []


def test_a_driver_that_is_killed_gives_its_hosts_back(tmp_path: Path) -> None:
    with ray_cluster(2, 2) as cluster:
        with steptune(cluster, tmp_path, "tune", PLACED, *SHORT, *TWO_HOSTS) as command:
            command.wait_until(lambda: "inspecting the" in command.output, 100)
            holder = command.holder()
            command.process.kill()
            command.process.wait()
            holder.wait(60)
        with reservation(cluster, tmp_path / "next", num_hosts=2, timeout_s=30.0) as (found, _):
            found.reserve()
        assert not [process for process in cluster.processes() if AGENT in process.cmdline()]
    assert not list((tmp_path / ".steptune" / "hosts").iterdir())


@pytest.mark.parametrize(
    ("with_another", "hosts_wait_s"),
    [(True, 0), *(pytest.param(n, 600, marks=pytest.mark.soak) for n in (False, True))],
)
def test_a_worker_runs_studies_on_hosts_that_the_cluster_reserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_another: bool, hosts_wait_s: int
) -> None:
    """A study on two hosts waits in the queue while others have a node, and loses nothing; as does, beside it, one on a
    single host of the same cluster, which takes turns with it until the wide one has waited long.
    """
    site = Site(tmp_path)
    site.queue = StudyQueue(site.store.engine, lease_s=LEASE_S, hosts_wait_s=hosts_wait_s)
    settings = StudySettings(
        budget_s=600, max_trials=1, only=("ddp_buckets",), num_ranks=2, num_hosts=2, device="cpu", measure=QUICK
    )
    study = new_study(new_id(), WORKLOAD, settings, tmp_path / "data")
    site.queue.submit(study, owner_id=None, required_device_kind="cpu")
    waiting = [study.study_id, *([site.submit(trials=1)] if with_another else [])]
    with ray_cluster(1, 1) as cluster:
        variables = {**cluster.variables, "STEPTUNE_HOSTS_WAIT_S": str(hosts_wait_s), "GLOO_SOCKET_IFNAME": "lo"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        try:
            with reservation(cluster, tmp_path / "other") as (other, _):
                other.reserve()
                site.worker("--once", "--runner", "ray", "--address", cluster.address, "--num-hosts", "2")
                lack = "the cluster has 2 nodes, 2 of them large enough, and 1 of 2 CPU free: the study starts once"
                wait_until(lambda: lack in site.entry(study.study_id).waits_for, site.log())
                assert lack in activity(site, study.study_id)
                [known] = site.queue.workers()
                assert known.cluster == other.cluster != ""
                if with_another:
                    reason = "hosts of the cluster: 1 host" if hosts_wait_s else "kept free for a study over 2 hosts"
                    wait_until(lambda: reason in site.entry(waiting[1]).waits_for, site.log())
                entries = site.queue.entries(waiting)
                assert {entry.state for entry in entries} == {StudyState.QUEUED}
                assert {entry.device_seconds for entry in entries} == {0}
            for study_id in waiting:
                entry = site.await_state(study_id, StudyState.COMPLETED)
                assert (entry.num_claims, entry.num_lost) == (1, 0)
        finally:
            site.close()
    began = [entry.claimed_at for entry in site.queue.entries(waiting)]
    assert hosts_wait_s or began == sorted(began)
    assert [site.store.get_study(study_id).environment.num_hosts for study_id in waiting] == [2, 1][: len(waiting)]


@pytest.mark.parametrize("soon", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_workers_study_goes_on_when_its_cluster_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon: bool
) -> None:
    """Soon enough, it repeats the trial that ran; too late, it waits in the queue, and no attempt is used up."""
    site = Site(tmp_path)
    settings = StudySettings(
        budget_s=600, max_trials=1, only=("ddp_buckets",), num_ranks=2, num_hosts=2, device="cpu", measure=QUICK
    )
    study_id = new_id()
    study = new_study(study_id, WORKLOAD, settings, tmp_path / "data")
    site.queue.submit(study, owner_id=None, required_device_kind="cpu")
    with ray_cluster(1, 1) as cluster:
        patience = {"STEPTUNE_RAY_TIMEOUT_S": "120" if soon else "1"}
        for name, value in {**cluster.variables, **patience, "GLOO_SOCKET_IFNAME": "lo"}.items():
            monkeypatch.setenv(name, value)
        try:
            worker = site.worker("--once", "--runner", "ray", "--address", cluster.address, "--num-hosts", "2")
            wait_until(lambda: site.store.trials(study_id), f"a trial runs: {site.log()}")
            cluster.close()
            if not soon:
                wait_until(lambda: "host 1 did not reconnect within 1 s" in states(site, study_id), site.log())
            cluster.start()
            entry = site.await_state(study_id, StudyState.COMPLETED)
            assert (entry.num_claims, entry.num_lost) == (1 if soon else 2, 0)
            assert worker.wait(60) == 0
            assert not [process for process in cluster.processes() if AGENT in process.cmdline()]
        finally:
            site.close()
    results = [trial.result for trial in site.store.trials(study_id) if trial.result is not None]
    lost = [attempt.failure.kind for result in results for attempt in result.repeated or ()]
    assert lost == ([FailureKind.INFRASTRUCTURE] if soon else []), site.log()


def states(site: Site, study_id: str) -> str:
    """Messages of all states that the study had."""
    return "\n".join(event.data["message"] for event in site.store.events(study_id) if event.kind == "state")


def activity(site: Site, study_id: str) -> str:
    """Text on the study's page that says what is going on."""
    shown = [event.data["activity"] for event in site.store.events(study_id) if event.kind == EVENT]
    return shown[-1] if shown else ""


class TestReserving:
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls) -> Iterator[Cluster]:
        with ray_cluster(2, num_gpus=2) as cluster:
            yield cluster

    def test_one_that_cannot_be_met_waits_visibly_and_ends_with_the_reason(
        self, tmp_path: Path, cluster: Cluster
    ) -> None:
        asked = ("tune", PLACED, *SHORT, *TWO_HOSTS, "--device", "cpu")
        with steptune(cluster, tmp_path, *asked, STEPTUNE_RAY_TIMEOUT_S="3") as command:
            assert command.end(100) != 0
        asked_for = "the study needs 2 hosts with 2 CPU each on separate nodes"
        lack = f"{asked_for}; the cluster has 1 node, 1 of them large enough, and"
        output = " ".join(command.output.split())
        assert (
            f"waiting for Ray: {lack} 2 of 2 CPU free: the cluster's current nodes can never meet this request"
            in output
        )
        assert f"Ray has not reserved the hosts within 3 s: {lack}" in output
        assert not list((tmp_path / ".steptune" / "studies").iterdir())

    def test_a_device_belongs_to_one_study_at_a_time(self, tmp_path: Path, cluster: Cluster) -> None:
        with reservation(cluster, tmp_path / "first", device="cuda") as (first, said):
            first.reserve()
            assert said[-1].startswith("reserved by Ray: node ")
            with (
                reservation(cluster, tmp_path / "third", device="cuda", ranks=2, timeout_s=2.0) as (third, _),
                pytest.raises(RunnerError, match=r"1 host with 2 GPU .* and 1 of 2 GPU and"),
            ):
                third.reserve()
            with reservation(cluster, tmp_path / "second", device="cuda") as (second, _):
                second.reserve()
                assert {first.gpus, second.gpus} == {"0", "1"}

    def test_gpus_that_the_drivers_node_does_not_have_are_refused_at_once(
        self, tmp_path: Path, cluster: Cluster
    ) -> None:
        with (
            reservation(cluster, tmp_path, device="cuda", ranks=3, timeout_s=600.0) as (found, said),
            pytest.raises(RunnerError, match=r"each host needs 3 GPUs, but the node of this process, .*, has 2"),
        ):
            found.reserve()
        assert not said

    def test_a_wrong_token_is_refused(self, tmp_path: Path, cluster: Cluster) -> None:
        with (
            reservation(cluster, tmp_path, token="guessed" * 8) as (found, _),
            pytest.raises(RunnerError, match="InvalidAuthToken: Authentication token is missing or incorrect"),
        ):
            found.reserve()


def test_a_cluster_that_asks_for_no_token_is_refused(tmp_path: Path) -> None:
    with (
        ray_cluster(1, with_token=False) as cluster,
        reservation(cluster, tmp_path) as (found, _),
        pytest.raises(RunnerError, match=r"the cluster accepts clients without a token.*--insecure-ray"),
    ):
        found.reserve()
