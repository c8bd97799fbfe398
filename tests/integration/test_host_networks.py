"""Emulated hosts: networks of their own, with links of a limited rate, that ranks enter."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from host_networks import sent_bytes, two_hosts
from marked import wait_until
from ranks import Ranks
from trial_builders import prepare, reference

from steptune.tuner.emulation import HOSTS_VARIABLE, NETWORKS_VARIABLE, num_emulated_hosts
from steptune.tuner.errors import ChoiceError, MissingDependencyError, PlatformError, RunnerError
from steptune.tuner.network import emulated
from steptune.tuner.network.emulated import emulated_hosts
from steptune.tuner.records import Candidate
from steptune.tuner.training.compression.lane import Lane
from steptune.tuner.training.hierarchy import Hierarchy
from steptune.tuner.training.hosts import make_levels
from steptune.tuner.trials.runner import LocalRunner

pytestmark = pytest.mark.xdist_group("ranks")

NUM_VALUES = 1 << 20
VALUE_BYTES = 4 * NUM_VALUES
FRAMING = 1.1
"""Headers, acknowledgements and the ranks' agreement on who is where, in what is sent."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Path, ...]]:
    with two_hosts() as networks:
        yield networks


def average(rank: int, levels: int) -> torch.Tensor:
    values = torch.full((NUM_VALUES,), float(rank))
    if levels == 2:
        Hierarchy(make_levels(), Lane(torch.device("cpu")), None).average(values, 0)
    else:
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values.unique()


def sent(ranks: Ranks, hosts: tuple[Path, ...], levels: int) -> list[dict[str, int]]:
    before = [sent_bytes(host) for host in hosts]
    for values in ranks.run(4, average, levels, networks=hosts):
        assert values.tolist() == [1.5]
    return [
        {name: count - old[name] for name, count in sent_bytes(h).items()} for h, old in zip(hosts, before, strict=True)
    ]


class TestTraffic:
    def test_a_flat_ring_sends_three_quarters_of_the_ranks_shares_over_the_link(
        self, ranks: Ranks, hosts: tuple[Path, ...]
    ) -> None:
        """Each of 4 ranks sends 2 * 3/4 of the values to the next one, and one of each host's next is on the other."""
        for number, counts in enumerate(sent(ranks, hosts, levels=1)):
            assert 1.5 * VALUE_BYTES < counts[f"link{number}"] < 1.5 * FRAMING * VALUE_BYTES

    def test_two_levels_send_a_third_less_over_it(self, ranks: Ranks, hosts: tuple[Path, ...]) -> None:
        """Each of a host's two ranks sends its half once; inside, both send a half to reduce and a half to gather."""
        for number, counts in enumerate(sent(ranks, hosts, levels=2)):
            assert VALUE_BYTES < counts[f"link{number}"] < FRAMING * VALUE_BYTES
            assert 2 * VALUE_BYTES < counts["lo"] < 2 * FRAMING * VALUE_BYTES


class TestTrials:
    def test_of_two_hosts_are_the_same_training(
        self, tmp_path: Path, hosts: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(NETWORKS_VARIABLE, ",".join(map(str, hosts)))
        study = prepare(reference("misbehaving", "Misbehaving"), tmp_path, num_ranks=4)
        try:
            assert study.runner.describe().num_hosts == 2
            before = sent_bytes(hosts[0])
            (result,) = study.run(study.spec(Candidate(choices={"hierarchical_allreduce": {"levels": 2}})))
        finally:
            study.runner.close()
        assert result.failure is None, result.failure
        assert result.guard is not None
        assert result.guard.passed
        assert [peak.rank for peak in result.memory] == [0, 1, 2, 3]
        assert sent_bytes(hosts[0])["link0"] > before["link0"]

    @pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), ("", "Invalid argument")])
    def test_a_network_that_is_none_ends_a_study_before_its_first_trial(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, reason: str
    ) -> None:
        path = tmp_path / "network"
        if content is not None:
            path.write_text(content)
        monkeypatch.setenv(NETWORKS_VARIABLE, f"{path},{path}")
        runner = LocalRunner(workload="zoo:synthetic", directory=tmp_path / "study", num_ranks=4)
        try:
            with pytest.raises(RunnerError, match=f"{NETWORKS_VARIABLE}: the network .* cannot be entered .*{reason}"):
                runner.describe()
        finally:
            runner.close()

    def test_a_network_without_a_link_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with two_hosts():  # it may be made here
            pass
        with emulated._namespace() as pid:
            monkeypatch.setenv(NETWORKS_VARIABLE, str(emulated._place(pid)))
            runner = LocalRunner(workload="zoo:synthetic", directory=tmp_path / "study", num_ranks=2)
            try:
                with pytest.raises(RunnerError, match="must have exactly one interface other than lo, got none"):
                    runner.describe()
            finally:
                runner.close()


class TestHosts:
    def test_links_are_limited_in_both_directions(self) -> None:
        others = namespaces_of_children()
        with two_hosts("500mbit"):
            found = [shaping(network) for network in namespaces_of_children() if network not in others]
        limited = re.findall(r"^qdisc tbf \w+: dev (\w+) root .*rate 500Mbit", "".join(found), re.MULTILINE)
        assert sorted(limited) == ["link0", "link1", "port0", "port1"]

    def test_are_gone_after_a_failure(self) -> None:
        with pytest.raises(RuntimeError, match="of a run"), two_hosts() as networks:
            raise RuntimeError("of a run")
        assert not any(network.exists() for network in networks)

    def test_are_gone_when_what_made_them_is_killed(self, tmp_path: Path) -> None:
        with two_hosts():  # they may be made here
            pass
        told = tmp_path / "networks"
        ask = f"import os, time; open({str(told)!r}, 'w').write(os.environ[{NETWORKS_VARIABLE!r}]); time.sleep(60)"
        command = [sys.executable, "-m", "steptune.tuner.network.emulated", "--", sys.executable, "-c", ask]
        with subprocess.Popen(command, start_new_session=True) as process:
            wait_until(lambda: told.exists() and told.read_text(), "the command has told")
            networks = [Path(path) for path in told.read_text().split(",")]
            assert all(network.exists() for network in networks)
            os.killpg(process.pid, signal.SIGKILL)
        wait_until(lambda: not any(network.exists() for network in networks), "the networks are gone")

    @pytest.mark.parametrize(
        ("num_hosts", "rate", "reason"),
        [
            (1, None, "must be from 2 to"),
            (9, None, "2 to 8"),
            (2, "fast", "must look like 500mbit or 25gbit, got 'fast'"),
            (2, "5", "must look like 500mbit or 25gbit, got '5'"),
        ],
    )
    def test_what_cannot_be_is_refused(self, num_hosts: int, rate: str | None, reason: str) -> None:
        with pytest.raises(ChoiceError, match=reason), emulated_hosts(num_hosts, rate):
            pass

    def test_a_missing_program_is_named_with_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(emulated.shutil, "which", lambda name, path: None)
        with (
            pytest.raises(MissingDependencyError, match="unshare, which is not installed: install util-linux"),
            emulated_hosts(),
        ):
            pass

    def test_where_namespaces_are_not_permitted_the_way_out_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refusing = tmp_path / "unshare"
        refusing.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
        refusing.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with (
            pytest.raises(
                PlatformError,
                match=r"Operation not permitted\): emulating hosts requires Linux, and root or",
            ),
            emulated_hosts(),
        ):
            pass

    def test_a_number_of_hosts_that_their_networks_contradict_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(NETWORKS_VARIABLE, "/run/netns/a,/run/netns/b")
        assert num_emulated_hosts() == 2
        monkeypatch.setenv(HOSTS_VARIABLE, "3")
        with pytest.raises(PlatformError, match="is 3, but STEPTUNE_HOST_NETWORKS names 2 networks"):
            num_emulated_hosts()


def namespaces_of_children() -> list[Path]:
    """Network namespaces of the hosts and of the switch between them."""
    return [Path(f"/proc/{child.pid}/ns/net") for child in psutil.Process().children() if child.name() == "cat"]


def shaping(network: Path) -> str:
    command = ["nsenter", f"--net={network}", "--", emulated._tool("tc"), "qdisc", "show"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
