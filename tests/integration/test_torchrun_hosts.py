"""Studies that torchrun starts on two hosts, with a link of a limited rate between them."""

import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_networks import two_hosts
from launched_hosts import ROOT, LaunchedHost, launched

WORKLOADS = Path(__file__).parents[1] / "workloads"
TUNE = ("-m", "steptune", "tune", f"{WORKLOADS / 'placed.py'}:Placed", "--foreign-load", "100", "--isolation", "none")
SHORT = ("--budget", "3m", "--trials", "1", "--only", "ddp_buckets")
"""The baseline alone: its trial runs on all hosts."""
LONG = ("--budget", "3m", "--trials", "6", "--only", "ddp_buckets")

pytestmark = [pytest.mark.xdist_group("hosts"), pytest.mark.timeout(600)]


@pytest.fixture
def networks() -> Iterator[tuple[Path, ...]]:
    with two_hosts("500mbit", needed_in_ci=True) as found:
        yield found


@pytest.mark.timeout(900)
def test_over_a_slow_link_two_levels_are_recommended(tmp_path: Path, networks: tuple[Path, ...]) -> None:
    """The model trains. It takes a minute and a half; the budget is for machines that others load."""
    table = f"{ROOT / 'benchmarks/workloads/large_table.py'}:LargeTable"
    asked = ("-m", "steptune", "tune", table, "--foreign-load", "1000", "--isolation", "none")
    limits = ("--budget", "10m", "--trials", "4", "--only", "hierarchical_allreduce")
    with launched(networks, tmp_path, *asked, *limits) as (first, _):
        wait_until(lambda: first.process.poll() is not None, first, 800)
        assert first.process.returncode == 0, first.output
    [(record,)] = Rows(first).all("SELECT record FROM recommendations")
    answer = json.loads(record)
    assert answer["candidate"]["choices"] == {"hierarchical_allreduce": {"levels": 2}}, first.output
    assert answer["gain"]["interval"]["low"] > 1


@pytest.mark.parametrize(
    ("moment", "asked"),
    [
        ("] baseline", SHORT),  # the first trial begins
        *(
            pytest.param(moment, LONG, marks=pytest.mark.soak)
            for moment in ("inspecting the workload", "] baseline", "running", "confirming")
        ),
    ],
)
def test_a_host_that_dies_ends_the_study_with_the_reason_and_it_is_resumed_on_both(
    tmp_path: Path, networks: tuple[Path, ...], moment: str, asked: tuple[str, ...]
) -> None:
    with launched(networks, tmp_path, *TUNE, *asked) as (first, second):
        wait_until(lambda: moment in first.output, first, 200)
        second.kill()
        wait_until(lambda: first.process.poll() is not None, first, 120)
        assert first.process.returncode != 0
        assert "did not reconnect within 3 s" in first.output
    study = Rows(first).study()
    assert study["state"] == "failed"
    assert "host 1 did not reconnect" in study["message"]
    finished = Rows(first).all("SELECT count(*) FROM trials")
    kept = folders(second)
    resume = ("-m", "steptune", "resume", "last", "--isolation", "none")
    with launched(networks, tmp_path, *resume) as (first, second):
        wait_until(lambda: first.process.poll() is not None, first, 280)
        assert first.process.returncode == 0, first.output
        wait_until(lambda: second.process.poll() is not None, second, 60)
        assert second.process.returncode == 0, second.output
    assert Rows(first).study()["state"] == "completed"
    assert Rows(first).all("SELECT count(*) FROM trials") > finished
    assert folders(second) == kept, "only the host that was killed kept its folder"
    assert "secret" not in first.output + second.output
    assert_ran_on_both(networks, first)


def folders(host: LaunchedHost) -> list[Path]:
    return sorted((host.folder / ".steptune").glob("hosts/*"))


def assert_ran_on_both(networks: tuple[Path, ...], first: LaunchedHost) -> None:
    """The first host has the ranks of both, with their logs and traces."""
    rows = Rows(first)
    environment = rows.study()["environment"]
    assert (environment["num_ranks"], environment["num_hosts"]) == (4, 2)
    assert environment["topology"]["host_of_rank"] == [0, 0, 1, 1]
    assert environment["topology"]["between"]["kind"] == "network"
    assert environment["topology"]["inside"]["kind"] == "loopback"
    logs = [path.read_text() for path in (first.folder / ".steptune").glob("studies/*/logs/*.log")]
    assert {place for log in logs for place in places(log)} == {
        (str(2 * host + local), str(local), str(network.readlink()))
        for host, network in enumerate(networks)
        for local in (0, 1)
    }
    traces = {kind for (kind,) in rows.all("SELECT kind FROM artifacts") if "trace" in kind}
    assert traces >= {"trace", "trace.1", "trace.2", "trace.3"}


def places(log: str) -> list[tuple[str, str, str]]:
    return re.findall(r"^rank (\d) local (\d) in (\S+)$", log, re.MULTILINE)


class Rows:
    """Records of the first host."""

    def __init__(self, host: LaunchedHost) -> None:
        self._path = host.folder / "steptune.db"

    def all(self, query: str) -> list[tuple[str, ...]]:
        database = sqlite3.connect(self._path)
        try:
            return database.execute(query).fetchall()
        finally:
            database.close()

    def study(self) -> dict[str, Any]:
        [(record, state)] = self.all("SELECT record, state FROM studies")
        return {**json.loads(record), "state": state}


def wait_until(condition: Callable[[], object], host: LaunchedHost, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, host.output
        time.sleep(0.2)
