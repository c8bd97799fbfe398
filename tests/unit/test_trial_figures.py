"""Figures of a trial in lists: worked out once, when it completes, and then a plain column."""

from __future__ import annotations

import math

import pytest
from api_builders import sqlite_url
from msgspec.structs import replace
from page_builders import stories
from report_builders import STEP_BEFORE, WINNER, make_result

from steptune.service.connections import create_engine_for
from steptune.service.queries.trials import list_trials
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import BASELINE, Purpose, TrialResult, TrialState
from steptune.tuner.trial_figures import figures_of, gain_over

BEFORE = float(sum(STEP_BEFORE.values()))


def start(name: str, *, step_ns: float = BEFORE, group: str = "", **changes) -> TrialResult:
    result = make_result(name, BASELINE, step_ns, purpose=Purpose.BASELINE)
    return replace(result, group=group or name, **changes)


class TestFigures:
    def test_they_are_of_clean_windows(self) -> None:
        result = start("a")
        first, *others = result.windows
        figures = figures_of(replace(result, windows=(replace(first, void="others"), *others)), [])
        total_ns, steps = (sum(getattr(w, name) for w in others) for name in ("duration_ns", "num_steps"))
        assert figures.num_windows == len(others)
        assert figures.step_time_ns == pytest.approx(total_ns / steps, rel=0.01)
        assert figures.units_per_s == pytest.approx(sum(w.num_units for w in others) / total_ns * 1e9, rel=0.01)
        assert figures.units_per_s * figures.step_time_ns == pytest.approx(1e9 * others[0].num_units / 20)
        assert figures.gain is None

    def test_epoch_restarts_are_part_of_the_step(self) -> None:
        plain = figures_of(start("a"), [])
        restarting = figures_of(start("a", epoch_restart_ns=60_000_000, steps_per_epoch=6), [])
        assert restarting.step_time_ns == pytest.approx(plain.step_time_ns + 1e7, rel=1e-3)

    def test_without_windows_there_are_none(self) -> None:
        assert figures_of(start("a", windows=()), [start("b")]) == (None, None, 0, None)

    def test_a_gain_is_over_the_start_that_took_turns_with_it_else_over_all(self) -> None:
        slow, quick = start("slow", step_ns=2 * BEFORE, group="turns"), start("quick")
        result = replace(make_result("c", WINNER, BEFORE), group="turns")
        assert figures_of(result, [slow, quick]).gain == pytest.approx(2.0, rel=0.05)
        assert figures_of(replace(result, group="alone"), [slow, quick]).gain == pytest.approx(math.sqrt(2), rel=0.05)

    def test_what_was_not_measured_has_no_gain(self) -> None:
        assert math.isnan(gain_over(None, [start("a")], 0.0))
        assert math.isnan(gain_over(start("a"), [], 0.0))


def test_a_list_has_what_the_results_say(tmp_path) -> None:
    engine = create_engine_for(sqlite_url(tmp_path))
    store = SqlStudyStore(engine)
    study, trials, _, _ = stories()["complete"]
    store.create_study(study)
    store.begin_trials([replace(t, state=TrialState.RUNNING, result=None) for t in trials])
    store.complete_trials([t.result for t in trials if t.result is not None])
    listed = list_trials(engine, study.study_id, state=None, limit=1000, after=None)
    starts = [t.result for t in trials if t.result and t.result.ok and t.candidate == BASELINE]
    assert starts
    assert any(row.gain is not None and row.gain > 1.1 for row in listed)
    for row, trial in zip(listed, trials, strict=True):
        assert trial.result is not None
        figures = figures_of(trial.result, starts)
        assert (row.step_time_ns, row.units_per_s, row.num_windows) == pytest.approx(figures[:3])
        if trial.candidate != starts[0].candidate:
            assert row.gain == pytest.approx(figures.gain)
    engine.dispose()
