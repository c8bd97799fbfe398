"""Stopping of all processes of a user, which two trial servers of a study may do at once."""

import os
import signal
import threading

import pytest

from steptune.tuner.trials import processes
from steptune.tuner.trials.processes import others_stopped


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, signal.Signals]]:
    """Signals that would have gone to all processes, with the thread that sent them."""
    found: list[tuple[str, signal.Signals]] = []

    def kill(pid: int, number: int) -> None:
        assert pid == -1
        found.append((threading.current_thread().name, signal.Signals(number)))

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(processes, "TURN_PAUSE_S", 0.005)
    return found


def stop(entered: threading.Event) -> None:
    with others_stopped(shares_user=True):
        entered.set()


def test_a_server_waits_until_another_lets_all_continue(
    sent: list[tuple[str, signal.Signals]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that stop each other at once would both stay stopped."""
    monkeypatch.setattr(processes, "TURN_ATTEMPTS", 10_000)
    entered = threading.Event()
    second = threading.Thread(target=stop, args=(entered,), name="second")
    with others_stopped(shares_user=True):
        second.start()
        assert not entered.wait(0.05)
    second.join(30)
    first = threading.current_thread().name
    assert sent == [
        (first, signal.SIGSTOP),
        (first, signal.SIGCONT),
        ("second", signal.SIGSTOP),
        ("second", signal.SIGCONT),
    ]


def test_user_code_that_keeps_the_turn_delays_no_kill_for_long(
    sent: list[tuple[str, signal.Signals]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TURN_ATTEMPTS", 2)
    with others_stopped(shares_user=True):
        stop(threading.Event())
    assert [number for _, number in sent] == [signal.SIGSTOP, signal.SIGSTOP, signal.SIGCONT, signal.SIGCONT]
