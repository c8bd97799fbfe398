"""Steps that an inspection waits for and times before it records."""

from __future__ import annotations

import pytest

from steptune.tuner.scripts.agent.window import LEAST_STEPS, MOST_STEPS, PERIOD_STEPS, Phase, Window

SLOW_NS, FAST_NS = 2_000_000_000, 20_000_000
RECORDED_STEPS = 2
"""Steps under the profiler where steps are slow: one that is not kept, and one that is."""


class OneRank:
    def claim(self, rank: int) -> bool:
        return True


def steps_before_recording(times_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Window, "_begin_recording", lambda window: window.end())
    made: list[int] = []
    window = Window(OneRank(), made, lambda: None)  # type: ignore[arg-type]
    window.step_ended()  # the first step has no time
    for time_ns in times_ns:
        made.append(time_ns)
        window.step_ended()
        if window.phase is Phase.OVER:
            return len(made)
    raise AssertionError(f"nothing was recorded after {len(made)} steps")


def test_slow_steps_are_recorded_after_few(monkeypatch: pytest.MonkeyPatch) -> None:
    num = steps_before_recording([SLOW_NS] * 100, monkeypatch)
    assert PERIOD_STEPS + num + RECORDED_STEPS == LEAST_STEPS
    assert num < 0.7 * steps_before_recording([SLOW_NS // 5] * 100, monkeypatch)
    assert steps_before_recording([FAST_NS] * 100, monkeypatch) < MOST_STEPS


def test_slow_steps_become_steady_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = steps_before_recording([SLOW_NS] * 100, monkeypatch)
    falling = [4 * SLOW_NS, 3 * SLOW_NS, 2 * SLOW_NS, 2 * SLOW_NS, int(1.5 * SLOW_NS)]
    assert steps_before_recording([*falling, *[SLOW_NS] * 100], monkeypatch) > steady


def test_compiling_in_the_first_steps_does_not_make_fast_steps_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = [30 * SLOW_NS, 20 * SLOW_NS]
    fast = steps_before_recording([FAST_NS] * 100, monkeypatch)
    assert steps_before_recording([*compiling, *[FAST_NS] * 100], monkeypatch) >= fast
