"""An interrupt, whenever it comes, leaves a database that can be written to while it is handled."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import sample_study

from steptune.service import connections
from steptune.service.database import open_store
from steptune.service.interrupts import held_back, interruptible

MOMENTS = 40


def at_call(wanted: int, act: Callable[[], object], run: Callable[[], object]) -> int:
    """Runs something and acts within its nth call or return.

    Returns:
        How many there were.
    """
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == wanted:
            act()

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_transaction_that_is_interrupted_holds_no_lock(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At moments spread over a whole transaction, the next one runs while the interrupt is handled."""
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_S", 0.0)
    store = open_store(f"sqlite:///{tmp_path}/steptune.db")
    study = sample_study()
    store.create_study(study)

    def write(kind: str = "interrupted") -> None:
        store.add_event(study.study_id, kind, {})

    write("first")  # what is made once is made
    num_calls = at_call(0, lambda: None, write)
    interrupts = 0
    with interruptible():
        for moment in range(1, num_calls, max(1, num_calls // MOMENTS)):
            try:
                at_call(moment, lambda: signal.raise_signal(number), write)
            except KeyboardInterrupt:
                interrupts += 1
                write("handled")
    assert interrupts >= MOMENTS
    assert sum(event.kind == "handled" for event in store.events(study.study_id)) == interrupts
    store.close()


def test_it_comes_when_the_outermost_ends() -> None:
    reached = []

    def nested() -> None:
        with held_back():
            with held_back():
                signal.raise_signal(signal.SIGTERM)
                reached.append("inner")
            reached.append("outer")
        reached.append("after")

    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            nested()
        with held_back():
            reached.append("once only")
    assert reached == ["inner", "outer", "once only"]


def test_handlers_are_as_before_and_what_is_ignored_stays_so() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with interruptible(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
    assert {number: signal.getsignal(number) for number in before} == before
