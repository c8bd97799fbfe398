"""Failures on one of several hosts are typed, leave nothing, and the next trial runs."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from host_agents import TwoHosts, start_agent, two_agents
from trial_builders import THREE_THREADS, Prepared, prepare, reference

from steptune.tuner.errors import HostsUnavailableError, PlatformError, RunnerError
from steptune.tuner.protocols import Progress, ProgressListener
from steptune.tuner.records import Deadlines, FailureKind, Scalar
from steptune.tuner.trials.connection import ServerConnection
from steptune.tuner.trials.host_group import HostGroup, SpreadServer
from steptune.tuner.trials.host_link import Put
from steptune.tuner.trials.runner import LocalRunner

pytestmark = pytest.mark.xdist_group("several_hosts")
PLAIN = {"guard": False, "profile": False}


@pytest.fixture
def study(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Prepared, TwoHosts]]:
    (tmp_path / "left").write_text("0")
    file, name, arguments = request.param
    workload = reference(
        file, name, **{k: v.format(tmp_path) if isinstance(v, str) else v for k, v in arguments.items()}
    )
    with begun(workload, tmp_path) as (prepared, hosts):
        yield prepared, hosts


@contextmanager
def begun(workload: str, directory: Path) -> Iterator[tuple[Prepared, TwoHosts]]:
    with two_agents(workload, directory) as hosts:
        options = {"num_ranks": 2, "hosts": hosts.group, "memory_limit_bytes": 1 << 30}
        prepared = prepare(workload, directory / "first", with_reference=False, **options)
        try:
            yield prepared, hosts
        finally:
            prepared.runner.close()


def misbehaving(deed: str) -> tuple[str, str, dict[str, Scalar]]:
    return "misbehaving", "Misbehaving", {"deed": deed, "rank": 1}


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """One study for failures after which its hosts go on."""
    file, name, arguments = misbehaving("none")
    with begun(reference(file, name, **arguments), tmp_path_factory.mktemp("failing")) as (prepared, _):
        yield prepared


@pytest.mark.parametrize(
    ("deed", "kind"),
    [
        ("out_of_memory", FailureKind.OUT_OF_MEMORY),
        ("raise", FailureKind.WORKLOAD_ERROR),
        ("exit", FailureKind.CRASH),
        ("hang", FailureKind.TIMEOUT),
    ],
)
def test_a_failure_on_another_host_is_the_trials_and_the_next_one_runs(
    failing: Prepared, deed: str, kind: FailureKind
) -> None:
    prepared = failing
    file, name, arguments = misbehaving(deed)
    deadlines = Deadlines(warm_up_s=5.0) if kind is FailureKind.TIMEOUT else Deadlines()
    spec = prepared.spec(THREE_THREADS, workload=reference(file, name, **arguments), deadlines=deadlines, **PLAIN)
    (result,) = prepared.run(spec)
    assert result.failure is not None
    assert result.failure.kind is kind, result.failure
    if kind is not FailureKind.TIMEOUT:
        assert result.failure.rank == 1
    assert prepared.run_baseline().ok


@pytest.mark.parametrize(
    "study",
    [
        ("misbehaving", "Killed", {"left": "{}/left", "victim": victim, "by": int(signal.SIGKILL)})
        for victim in ("rank", "server")
    ],
    indirect=True,
)
def test_a_trial_that_its_other_host_ended_is_repeated(study: tuple[Prepared, TwoHosts]) -> None:
    (study[1].directory / "left").write_text("1")
    result = study[0].run_baseline()
    assert result.ok, result.failure
    [attempt] = result.repeated
    assert attempt.failure is not None


@pytest.mark.parametrize("study", [misbehaving("none")], indirect=True)
class TestLostHost:
    def test_the_trial_is_repeated_once_the_host_is_back(self, study: tuple[Prepared, TwoHosts]) -> None:
        prepared, hosts = study
        lost: list[str] = []

        def lose(progress: Progress) -> None:
            if progress.text.startswith("window") and not lost:
                lost.append(progress.text)
                hosts.lose_second()
                hosts.start_second()

        (result,) = prepared.run(prepared.spec(**PLAIN), listener=lose)
        assert lost
        assert result.ok
        [attempt] = result.repeated
        assert attempt.failure is not None
        assert attempt.failure.kind is FailureKind.INFRASTRUCTURE
        assert "host 1 (127.0.0.1) is lost" in attempt.failure.message

    def test_one_that_stays_away_ends_the_study_with_the_reason(self, study: tuple[Prepared, TwoHosts]) -> None:
        prepared, hosts = study
        hosts.group.patience_s = 1.0

        def lose(progress: Progress) -> None:
            if progress.text.startswith("window"):
                hosts.lose_second()

        with pytest.raises(HostsUnavailableError, match=r"host 1 did not reconnect within 1 s.*`steptune resume`"):
            prepared.run(prepared.spec(**PLAIN), listener=lose)


@pytest.mark.parametrize("study", [misbehaving("none")], indirect=True)
class TestReplacedHost:
    """Another one comes in the place of a lost one, as where a cluster finds it."""

    def test_one_that_is_alike_takes_its_place(self, study: tuple[Prepared, TwoHosts]) -> None:
        prepared, hosts = study
        prepared.runner.describe()
        (result,) = prepared.run(prepared.spec(**PLAIN), listener=replacing(hosts, place="c"))
        assert result.ok
        assert len(result.repeated) == 1
        assert hosts.group.places == ["c"]

    def test_one_that_is_not_alike_is_refused(self, study: tuple[Prepared, TwoHosts]) -> None:
        prepared, hosts = study
        prepared.runner.describe()
        one_core = ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))
        with pytest.raises(RunnerError, match=r"the hosts differ: host 1 has .*cores"):
            prepared.run(prepared.spec(**PLAIN), listener=replacing(hosts, place="c", within=one_core))


def replacing(hosts: TwoHosts, **second: Any) -> ProgressListener:
    """Replaces the second host while the first trial is measured."""
    lost: list[str] = []

    def lose(progress: Progress) -> None:
        if progress.text.startswith("window") and not lost:
            lost.append(progress.text)
            hosts.lose_second()
            hosts.start_second(**second)

    return lose


@pytest.mark.parametrize("study", [misbehaving("none")], indirect=True)
class TestBeforeATrial:
    def test_a_host_lost_before_a_server_is_opened_there_comes_back(
        self, study: tuple[Prepared, TwoHosts], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between the last look at the hosts and the first word to them."""
        prepared, hosts = study
        prepared.runner.close()
        spread, locals_ = HostGroup.spread, []

        def lose(group: HostGroup, local: ServerConnection, *others: Any) -> SpreadServer:
            locals_.append(local)
            if len(locals_) == 1:
                hosts.lose_second()
                hosts.start_second()
                [host] = group.hosts.values()
                host._link.close()  # the kernel's word of it
            return spread(group, local, *others)

        monkeypatch.setattr(HostGroup, "spread", lose)
        (result,) = prepared.run(prepared.spec(**PLAIN))
        assert result.ok, result.failure
        first, second = locals_[:2]
        assert first.has_ended, "a trial server was left behind"
        assert not second.has_ended

    def test_traces_of_an_earlier_attempt_make_room(self, study: tuple[Prepared, TwoHosts]) -> None:
        prepared, hosts = study
        spec = prepared.spec(**PLAIN)
        group = hosts.group
        assert prepared.run_baseline().ok
        part = Put(path=f"trials/{spec.trial_id}/rank1.trace.json", data=b"{}")
        group.take_back(part, 1)
        (result,) = prepared.run(spec)
        assert result.ok, result.failure
        group.take_back(part, 1)


class TestJoining:
    def test_who_does_not_know_the_secret_does_not_join(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("steptune.tuner.trials.host_group.GATHER_S", 8.0)
        group = a_group(tmp_path, "zoo:synthetic")
        agent = start_agent(group.port, tmp_path / "second", secret="guessed")
        try:
            with pytest.raises(RunnerError, match="host 1 did not connect within 8 s"):
                group.gather()
        finally:
            agent.kill()
            agent.communicate()
            group.close()

    def test_a_host_with_other_code_refuses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        workload = reference("regression", "Regression")
        monkeypatch.setattr("steptune.tuner.trials.host_group.source_digest", lambda reference: "another")
        group = a_group(tmp_path, workload)
        agent = start_agent(group.port, tmp_path / "second")
        runner = LocalRunner(workload=workload, directory=tmp_path / "first", num_ranks=2, hosts=group)
        try:
            with pytest.raises(
                PlatformError, match=r"host 1 .* cannot serve the study: .* differs from the first host's file"
            ):
                runner.describe()
        finally:
            runner.close()
            group.close()
            _, said = agent.communicate()
        assert b"differs from the first host's file" in said


def a_group(directory: Path, workload: str) -> HostGroup:
    return HostGroup(
        num_hosts=2,
        ranks_per_host=1,
        address="127.0.0.1",
        secret=b"a secret of tests, which is as long as it has to be",
        workload=workload,
        directory=directory / "first",
    )
