"""Steps that an inspection waits for and times before it records."""

from __future__ import annotations

import pytest

from steptune.tuner.scripts.agent.trial_window import TrialWindow
from steptune.tuner.scripts.agent.window import LEAST_STEPS, MOST_STEPS, PERIOD_STEPS, Phase, Window
from steptune.tuner.scripts.guard_files import NUM_AUDITS, NUM_STEPS, NUM_WIDE
from steptune.tuner.scripts.runner import LEAST_WINDOWS

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


@pytest.mark.parametrize("unsteady", [1.0, 1.5])
def test_a_script_whose_slow_steps_suffice_for_the_inspection_has_enough_for_its_trials(unsteady: float) -> None:
    """Guarded steps, one step that has no time, warm-up and the windows with which a script may end."""
    settings = {"warm_up_s": 0.0, "window_s": 0.2, "min_rounds": 5, "max_rounds": 60, "half_width": 0.01, "cap_s": 99.0}
    made: list[int] = []
    window = TrialWindow(
        OneRank(),  # type: ignore[arg-type]
        made,
        lambda: None,
        {**settings, "profile": False, "queue": 0, "guarded": True},
        [0] * LEAST_STEPS,
    )
    window.step_ended()  # the first step has no time
    while len(window.windows) < LEAST_WINDOWS:
        made.append(int(SLOW_NS * (unsteady if len(made) % 2 else 1.0)))
        window.step_ended()
        assert len(made) <= LEAST_STEPS
    assert NUM_STEPS + NUM_AUDITS + NUM_WIDE + 1 + len(made) <= LEAST_STEPS
