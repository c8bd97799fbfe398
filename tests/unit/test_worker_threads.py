"""Threads that ran, in processes that were started with a binding and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from steptune.tuner.strategies import strategy_named
from steptune.tuner.training import worker_threads
from steptune.tuner.training.worker_threads import WorkerThread, are_bound, threads_of_an_operator

THREADS = strategy_named("cpu_threads")
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
PROGRAM = """
import json, os, sys, torch
from steptune.tuner.strategies import strategy_named
os.environ.update(json.loads(sys.argv[1]))
torch.set_num_threads(2)
print(json.dumps(strategy_named("cpu_threads").evidence(None)))
"""

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores of Linux")


def evidence(at_start: dict[str, str], later: dict[str, str]) -> dict[str, Any]:
    """Evidence of a process that has variables from its beginning, and sets others once torch is loaded."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(later)]
    found = subprocess.run(command, env={**os.environ, **at_start}, capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


@pytest.mark.parametrize("way", ["close", "spread", "true"])
def test_a_binding_is_seen_where_the_threads_have_cores_of_their_own(way: str) -> None:
    choice = {"num_threads": None, "bind": way}
    found = evidence(THREADS.environment_variables(choice), {})
    assert (found["bind"], found["threads"]) == (way, 2)
    effect = THREADS.took_effect(found, choice)
    assert effect.took
    assert effect.detail == "operators ran on 2 threads bound to 2 separate cores"


def test_a_variable_that_came_too_late_binds_nothing() -> None:
    choice = {"num_threads": None, "bind": "close"}
    found = evidence({}, THREADS.environment_variables(choice))
    assert found["bind"] is None
    assert not THREADS.took_effect(found, choice).took


def test_a_pool_has_the_threads_that_run_not_those_that_torch_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert len(threads_of_an_operator()) == 1
    assert not THREADS.took_effect(THREADS.evidence(None), {"num_threads": 2, "bind": None}).took  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("places", "bound"),
    [([(0,), (1,)], True), ([(0, 1), (0, 1)], False), ([(0,), (0,)], False), ([(0,), (0, 1)], False), ([(1,)], True)],
)
def test_bound_is_a_physical_core_for_each(
    places: list[tuple[int, ...]], bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_threads, "_siblings", lambda core: {core})
    assert are_bound([WorkerThread(allowed=place, core=place[0]) for place in places]) is bound


def test_two_logical_cores_of_one_physical_are_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_threads, "_siblings", lambda core: {core % 2, core % 2 + 2})
    assert are_bound([WorkerThread(allowed=(0, 2), core=0), WorkerThread(allowed=(1, 3), core=1)])
    assert not are_bound([WorkerThread(allowed=(0,), core=0), WorkerThread(allowed=(2,), core=2)])


def test_where_the_system_does_not_tell_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(worker_threads, "TASKS", tmp_path / "none")
    assert THREADS.evidence(None) == {}  # type: ignore[arg-type]
