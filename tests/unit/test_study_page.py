"""The data behind a study's page: configurations, neighbours, importance, convergence, contributions, epochs."""

from __future__ import annotations

import math

import pytest
from builders import sample_facts
from msgspec.structs import replace
from page_builders import EFFECTS, OUT_OF_MEMORY, REJECTED, large_story
from report_builders import (
    STUDY_ID,
    WINNER,
    WORKERS,
    WORKERS_AND_THREADS,
    complete_study,
    failed_study,
    make_parts,
    make_recommendation,
    make_result,
    make_study,
    make_trials,
    running_study,
    stored,
    table,
    without_gain,
)

from steptune.dashboards.candidates import get_candidates_info, plot_memory
from steptune.dashboards.contributions import get_contributions_info
from steptune.dashboards.convergence import get_convergence_info, plot_convergence
from steptune.dashboards.effects import Effects
from steptune.dashboards.epochs import get_epoch_info
from steptune.dashboards.history import get_history_info
from steptune.dashboards.importance import get_importance_info, plot_importance
from steptune.dashboards.neighbours import get_neighbours_info, plot_neighbours
from steptune.dashboards.report import trials_shown
from steptune.dashboards.site import STANDALONE, Site
from steptune.dashboards.sources import snapshot
from steptune.dashboards.study_page import study_context, top_rows
from steptune.dashboards.templating import render
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import BASELINE, Candidate, Interval, MemoryPeak, Purpose, ScriptFacts, StudyState, Verdict
from steptune.tuner.search.effects import EffectModel


def candidates_of(store: MemoryStudyStore):
    return get_candidates_info(store, STUDY_ID, Effects(store.trials(STUDY_ID)))


def neighbours_of(store: MemoryStudyStore):
    effects = Effects(store.trials(STUDY_ID), store.recommendation(STUDY_ID))
    return get_neighbours_info(store, STUDY_ID, effects, get_candidates_info(store, STUDY_ID, effects))


def importance_of(store: MemoryStudyStore):
    return get_importance_info(store, STUDY_ID, Effects(store.trials(STUDY_ID)))


def convergence_of(store: MemoryStudyStore):
    effects = Effects(store.trials(STUDY_ID), store.recommendation(STUDY_ID))
    return get_convergence_info(store, STUDY_ID, get_history_info(store, STUDY_ID), effects)


def of_results(*results) -> MemoryStudyStore:
    return stored(make_study(state=StudyState.RUNNING), make_trials(list(results)))


class TestCandidates:
    def test_each_configuration_is_one_row_with_the_speed_that_its_trials_show(self) -> None:
        rows = candidates_of(complete_study())
        info = table(rows).set_index("key")
        assert info.loc[BASELINE.key, ["name", "gain", "num_starts"]].tolist() == ["today", 1.0, 9]
        row = info.loc[WINNER.key]
        assert (row["name"], row["num_starts"]) == ("recommended", 6)
        assert row["low"] < 2.42 < row["high"]
        assert row["gain"] == pytest.approx(2.42, rel=0.05)

    def test_what_may_not_be_used_is_shown_as_such(self) -> None:
        """Out of memory and another training have no speed, whatever was measured before."""
        too_large = Candidate(choices={"micro_batch": {"size": 64}})
        other = Candidate(choices={"precision": {"level": "O3"}})
        store = of_results(
            make_result("a", BASELINE, 1e7, purpose=Purpose.BASELINE),
            make_result("b", too_large, 1e7, failure=OUT_OF_MEMORY),
            replace(make_result("c", other, 5e6), guard=REJECTED),
        )
        rows = candidates_of(store)
        info = table(rows).set_index("key")
        assert info.loc[too_large.key, "outcome"] == "out_of_memory"
        assert "24.1 GiB" in info.loc[too_large.key, "note"]
        assert info.loc[other.key, "outcome"] == "guard_rejected"
        assert info.loc[[too_large.key, other.key], "gain"].isna().all()
        assert not info.loc[[too_large.key, other.key], "on_front"].any()

    def test_the_front_is_what_nothing_beats_in_speed_and_memory(self) -> None:
        small, large, beaten = (Candidate(choices={"micro_batch": {"size": size}}) for size in (1, 2, 3))

        def result(name, candidate, step_ns, memory):
            purpose = Purpose.BASELINE if candidate.is_baseline else Purpose.EXPLORE
            made = make_result(name, candidate, step_ns, purpose=purpose)
            return replace(made, memory=(MemoryPeak(rank=0, resident_bytes=memory << 20),))

        store = of_results(
            result("a", BASELINE, 1e7, 500),
            result("b", small, 1.1e7, 300),
            result("c", large, 6e6, 900),
            result("d", beaten, 9e6, 950),
        )
        rows = candidates_of(store)
        info = table(rows).set_index("key")
        assert info["on_front"].to_dict() == {
            BASELINE.key: True,
            small.key: True,
            large.key: True,
            beaten.key: False,
        }

    def test_every_configuration_is_in_the_figure(self) -> None:
        rows = candidates_of(complete_study())
        info = table(rows)
        figure = plot_memory(rows)
        assert sum(len(trace.x) for trace in figure.data if trace.mode == "markers") == len(info)

    def test_around_one_configuration_alone_there_is_no_memory_below_zero(self) -> None:
        assert plot_memory(candidates_of(complete_study())[:1]).layout.xaxis["rangemode"] == "tozero"


def test_of_a_growing_study_the_model_is_fitted_now_and_then_only(monkeypatch) -> None:
    """Yet every trial counts."""
    trials = large_story(40)[1]
    fits: list[int] = []
    inner = EffectModel._fit
    monkeypatch.setattr(EffectModel, "_fit", lambda model: fits.append(len(model._observations)) or inner(model))
    found = [Effects(trials[:count]) for count in range(30, 41)]
    assert len(fits) <= 3
    measured = {sum(trial.result.ok for trial in trials[:count]) for count in range(30, 41)}
    assert len({effects.ratio(trials[5].candidate, BASELINE) for effects in found}) == len(measured) > 5


class TestNeighbours:
    def test_only_those_one_strategy_away_are_listed(self) -> None:
        rows = neighbours_of(complete_study())
        info = table(rows)
        assert info[["strategy", "here", "there"]].to_numpy().tolist() == [
            ["optimizer_implementation", "implementation=fused", "as today"]
        ]
        assert info["ratio"].iloc[0] == pytest.approx(0.96, abs=0.03)
        assert len(plot_neighbours(rows).data[0].x) == 1

    def test_without_a_part_it_has_the_inverse_of_the_contribution_or_no_figure(self) -> None:
        """The model of the search would be a second statement of the same."""
        store = complete_study()
        for num_blocks, ratio in ((5, 1 / 1.04), (0, math.nan)):
            parts = tuple(replace(part, num_blocks=num_blocks) for part in make_recommendation().parts)
            store._recommendations[STUDY_ID] = make_recommendation(parts=parts)
            [row] = neighbours_of(store)
            assert row.ratio == pytest.approx(ratio, nan_ok=True)

    def test_one_that_failed_is_listed_without_a_speed(self) -> None:
        rows = neighbours_of(running_study(9))
        info = table(rows)
        compiled = info[info["strategy"] == "compile"]
        assert compiled["ratio"].isna().all()
        assert compiled["outcome"].tolist() == ["failed"]

    def test_before_anything_leads_there_are_none(self) -> None:
        assert neighbours_of(running_study(2)) == []


class TestImportance:
    def test_the_strategy_with_the_largest_effect_comes_first(self) -> None:
        rows = importance_of(complete_study())
        info = table(rows)
        assert info["strategy"].iloc[0] == "data_loading"
        assert info["best"].iloc[0] == "num_workers=2, persistent_workers=on"
        assert info["worst"].iloc[0] == "as today"
        assert 1.3 < info["low"].iloc[0] < info["ratio"].iloc[0] < info["high"].iloc[0]

    def test_a_known_surface_is_found_with_its_intervals(self) -> None:
        """Surface of 200 noisy trials, most of them around the best. One of best and worst may be today's."""
        study, trials, decisions, _ = large_story()
        rows = importance_of(stored(study, trials, decisions))
        info = table(rows).set_index("strategy")
        for strategy, effects in EFFECTS.items():
            true = max(1.0, *effects) / min(1.0, *effects)
            assert info.loc[strategy, "low"] < true < info.loc[strategy, "high"]
            assert info.loc[strategy, "ratio"] == pytest.approx(true, rel=0.01)
        assert info["paired"].all()
        assert info.loc["backend_flags", "low"] < 1 < info.loc["memory_format", "low"]

    def test_choices_that_were_only_tried_together_have_wide_intervals(self) -> None:
        apart = Candidate(choices={"data_loading": WORKERS})
        together = WORKERS_AND_THREADS
        base = [make_result(f"base{n}", BASELINE, 1e7, purpose=Purpose.BASELINE, seed=n) for n in range(4)]
        both = [make_result(f"both{n}", together, 5e6, seed=10 + n) for n in range(4)]
        alone = [make_result(f"one{n}", apart, 6e6, seed=20 + n) for n in range(4)]
        mixed = table(importance_of(of_results(*base, *both))).set_index("strategy")
        told = table(importance_of(of_results(*base, *both, *alone))).set_index("strategy")

        def width(info, name):
            return math.log(info.loc[name, "high"] / info.loc[name, "low"])

        assert width(mixed, "data_loading") > 1.5 * width(told, "data_loading")

    def test_without_a_measured_choice_there_is_none(self) -> None:
        assert importance_of(failed_study()) == []
        assert importance_of(running_study(4)) == []

    def test_the_figure_has_a_bar_a_strategy(self) -> None:
        rows = importance_of(complete_study())
        info = table(rows)
        assert len(plot_importance(rows).data[0].x) == len(info)


class TestConvergence:
    def test_the_line_is_what_was_accepted_and_time_adds_up(self) -> None:
        store = complete_study()
        rows = convergence_of(store)
        info = table(rows)
        assert info["best"].iloc[0] == 1.0
        assert info["best"].dropna().is_monotonic_increasing
        assert info["spent_s"].iloc[0] == pytest.approx(5.2)
        # Blocks of confirmation ran their two trials at the same time.
        assert info["spent_s"].iloc[-1] == pytest.approx(5.2 * 15)
        assert "fused" in info["best_label"].iloc[-1]
        assert plot_convergence(rows, 480.0).data[0].name == "accepted so far"

    def test_a_lucky_trial_that_was_not_accepted_does_not_count(self) -> None:
        lucky = make_result("b", WINNER, 2e6)
        store = of_results(make_result("a", BASELINE, 1e7, purpose=Purpose.BASELINE), lucky)
        rows = convergence_of(store)
        info = table(rows)
        assert info["gain"].iloc[1] == pytest.approx(5.0, rel=0.05)
        assert info["best"].iloc[1] == 1.0


class TestContributions:
    def test_each_strategy_has_what_it_brought_and_took(self) -> None:
        rows = get_contributions_info(complete_study(), STUDY_ID)
        info = table(rows).set_index("strategy")
        loading = info.loc["data_loading"]
        assert (loading["num_tried"], loading["num_accepted"], loading["own_gain"]) == (1, 1, 1.92)
        assert loading["spent_s"] == pytest.approx(2 * 5.2)
        assert info.loc["compile", ["num_tried", "num_rejected"]].tolist() == [1, 1]
        assert math.isnan(info.loc["compile", "own_gain"])
        assert info.index[0] == "data_loading"

    def test_confirmations_and_what_was_not_tried_are_no_attempts(self) -> None:
        rows = get_contributions_info(complete_study(), STUDY_ID)
        info = table(rows)
        assert "precision" not in set(info["strategy"])
        assert info["num_tried"].sum() == 5


class TestEpochs:
    def test_hours_follow_from_rates_and_the_length_of_an_epoch(self) -> None:
        study = make_study(facts=replace(sample_facts(), steps_per_epoch=1000, units_per_batch=32.0))
        recommendation = make_recommendation(baseline_units_per_s=16.0, units_per_s=32.0)
        info = get_epoch_info(study, recommendation)
        assert info.before_h == pytest.approx(2000 / 3600)
        assert info.after_h == pytest.approx(1000 / 3600)
        assert info.payback_epochs == pytest.approx(31.5)

    def test_without_the_length_of_an_epoch_only_the_search_has_hours(self) -> None:
        info = get_epoch_info(make_study(), make_recommendation())
        assert (info.before_h, info.after_h, info.payback_epochs) == (None, None, None)
        assert info.tuning_h == pytest.approx(462 / 3600)


class TestPage:
    def test_the_best_are_listed_with_speed_memory_and_risk(self) -> None:
        rows = top_rows(make_recommendation())
        assert [(row.name, row.numerics) for row in rows] == [("recommended", "rounding"), ("", "rounding")]
        assert rows[1].label == WORKERS_AND_THREADS.label

    def test_todays_settings_are_as_fast_as_themselves(self) -> None:
        """The recommendation's gain is then that of the best of those that were not confirmed."""
        today = top_rows(without_gain())[0]
        assert (today.name, today.gain, today.interval) == ("recommended: today's settings", 1.0, None)

    def test_a_service_links_to_trials_and_a_report_only_to_those_that_it_holds(self) -> None:
        served = render("study.html", Site(), **study_context(complete_study(), STUDY_ID, Site()))
        assert served.count('href="/trials/trial0005"') >= 2
        alone = render("study.html", STANDALONE, **study_context(complete_study(), STUDY_ID, STANDALONE))
        assert "/trials/" not in alone

    def test_a_report_shows_the_trials_that_the_page_speaks_of(self) -> None:
        source = snapshot(complete_study(), STUDY_ID)
        assert [trial.sequence for trial in trials_shown(source, STUDY_ID)] == [4, 10]

    def test_only_a_search_that_goes_on_promises_something_to_use(self) -> None:
        for store, promised in ((running_study(9), True), (failed_study(), False)):
            page = render("study.html", Site(), **study_context(store, STUDY_ID, Site()))
            assert ("nothing to use yet" in page) == promised

    @pytest.mark.parametrize("verdict", [Verdict.NOT_SEARCHED, Verdict.INCONCLUSIVE, Verdict.NO_SIGNIFICANT_GAIN])
    def test_a_page_recommends_todays_settings_only_where_something_is_known(self, verdict, tmp_path) -> None:
        r = without_gain(verdict=verdict, needed_budget_s=170.0, prospect="The next minute would try more.")
        script = ScriptFacts(command=("python", "train.py"), folder=str(tmp_path))
        study = make_study(workload="-- python train.py", facts=replace(sample_facts(), script=script))
        page = render("study.html", Site(), **study_context(stored(study, recommendation=r), STUDY_ID, Site()))
        assert ("the recommendation is today" in page) == (verdict is Verdict.NO_SIGNIFICANT_GAIN)
        assert f"steptune resume {STUDY_ID} --budget" in page.partition('id="use"')[2]
        assert "<h1>python train.py</h1>" in page

    def test_a_contribution_reads_alike_wherever_the_page_states_it(self) -> None:
        """In the answer and in the evidence: none proven with its interval, not measured, or its ratio."""
        unclear, unknown, *others = make_parts()
        unclear = replace(unclear, gain=1.01, interval=Interval(low=0.98, high=1.04), num_blocks=4)
        unknown = replace(unknown, gain=None, interval=None, num_blocks=0)
        recommendation = make_recommendation(parts=(unclear, unknown, *others))
        site = Site()
        page = render(
            "study.html", site, **study_context(stored(make_study(), recommendation=recommendation), STUDY_ID, site)
        )
        cells = [part.partition("</td>")[0] for part in page.split('data-label="contribution">')[1:]]
        assert sum(cell.startswith("none proven<br>") and "0.980× to 1.040×" in cell for cell in cells) == 2, cells
        assert sum("not measured" in cell for cell in cells) == 2

    def test_base_path_is_part_of_every_link(self) -> None:
        site = Site(base_path="/tune", may_submit=True)
        page = render("study.html", site, **study_context(complete_study(), STUDY_ID, site))
        links = [part.partition('"')[0] for part in page.split('href="')[1:]]
        assert links
        assert all(link.startswith(("/tune/", "#", "data:")) for link in links)
