"""Steps that an inspection waits for and times before it records."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptune.tuner.scripts.agent import window as agent_window
from steptune.tuner.scripts.agent.files import SharedFolder
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


def after_recording(
    times_ns: list[int], num_recorded: int, monkeypatch: pytest.MonkeyPatch, remaining: tuple[int, int] | None = None
) -> Window:
    """Return a window that has just recorded steps, after these further steps."""
    clock = [0]
    monkeypatch.setattr(agent_window, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(Window, "_begin_detail", lambda window: window.end())
    made = [FAST_NS] * 8
    window = Window(OneRank(), made, lambda: remaining)  # type: ignore[arg-type]
    window._num_recorded, window._num_ranks = num_recorded, 1
    window._begin_again()
    for time_ns in times_ns:
        made.append(time_ns)
        clock[0] += time_ns
        window.step_ended()
        if window.phase is Phase.OVER:
            break
    return window


def test_steps_are_timed_again_after_the_recorded_ones_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    window = after_recording([9 * FAST_NS, *[2 * FAST_NS] * 20], 10, monkeypatch)
    assert window.after_ns == 2 * FAST_NS
    assert window.phase is Phase.OVER


def test_a_pause_in_one_block_after_the_recorded_steps_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = [FAST_NS, FAST_NS, 50 * FAST_NS, *[FAST_NS] * 20]
    assert after_recording(paused, 10, monkeypatch).after_ns == FAST_NS


@pytest.mark.parametrize("num_recorded", range(2, 11))
def test_a_pause_after_the_recorded_steps_does_not_count_however_few_they_are(
    num_recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = [FAST_NS, 50 * FAST_NS, *[FAST_NS] * 20]
    assert after_recording(paused, num_recorded, monkeypatch).after_ns == FAST_NS


def test_all_ranks_record_as_many_steps_as_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that needs more steps than another waits for it in the script's own collectives."""
    lasting = {0: 99_000_000, 1: 101_000_000}
    lengths: dict[int, tuple[int, int]] = {}
    for rank, time_ns in lasting.items():
        monkeypatch.setattr(agent_window, "rank_and_size", lambda rank=rank: (rank, 2))
        clock, made = [0], [time_ns] * 8
        monkeypatch.setattr(agent_window, "perf_counter_ns", lambda clock=clock: clock[0])
        window = Window(SharedFolder(str(tmp_path)), made, lambda: None)
        while window.phase in (Phase.WARM_UP, Phase.TIMING):
            made.append(time_ns)
            clock[0] += time_ns
            window.step_ended()
        window._profiler.stop()
        lengths[rank] = len(made), window._num_recorded
    assert lengths[0] == lengths[1]


def test_steps_are_not_timed_again_across_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    window = after_recording([FAST_NS] * 20, 4, monkeypatch, remaining=(5, 40))
    assert window.after_ns is None
    assert window.phase is Phase.OVER
    assert after_recording([FAST_NS] * 20, 4, monkeypatch, remaining=(6, 40)).after_ns == FAST_NS


def test_the_unprofiled_step_is_the_mean_of_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    window = after_recording([3 * FAST_NS] * 20, 4, monkeypatch)
    window._timed_from, window._recorded_from = 2, 8
    assert window.before_ns == FAST_NS
    assert window.step_time_ns == 2 * FAST_NS
