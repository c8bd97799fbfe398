"""The data of figures, and the report: what it says in every state, and what it must never load or run."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from builders import sample_recommendation, sample_result, sample_study, sample_trial
from msgspec.structs import replace
from plotly.offline import get_plotlyjs
from report_builders import (
    BATCH,
    STEP_AFTER,
    STEP_BEFORE,
    STUDY_ID,
    WINNER,
    WORKERS_AND_THREADS,
    complete_study,
    failed_study,
    make_recommendation,
    make_result,
    make_story,
    make_study,
    make_trials,
    running_study,
    stored,
    table,
    without_gain,
)

from steptune.dashboards import theme, units
from steptune.dashboards.breakdown import get_breakdown_info, get_comparison_info, mean_step_ms, plot_breakdown
from steptune.dashboards.effects import Effects
from steptune.dashboards.gains import get_gains_info, plot_gains
from steptune.dashboards.headline import get_headline_info, more_time_command
from steptune.dashboards.history import LOOKS, get_history_info, plot_history
from steptune.dashboards.report import render_report
from steptune.dashboards.site import STANDALONE, asset_text
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.story import get_not_tried_info, get_tried_info
from steptune.dashboards.study_page import study_context
from steptune.tuner.costs.categories import CATEGORIES, GROUPS
from steptune.tuner.export import exporters_for
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import (
    BASELINE,
    Attempt,
    Candidate,
    Decision,
    Failure,
    FailureKind,
    Gain,
    GuardVerdict,
    Interval,
    Move,
    Phase,
    Purpose,
    SampleUnit,
    StudyState,
    Verdict,
)

HOSTILE = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>"


class TestBreakdown:
    def test_categories_of_each_configuration_sum_to_its_step(self) -> None:
        rows = get_breakdown_info(complete_study(), STUDY_ID)
        info = table(rows)
        sums = info.groupby("configuration")["ms_per_step"].sum()
        assert sums["today"] == pytest.approx(sum(STEP_BEFORE.values()) / 1e6)
        assert sums["recommended"] == pytest.approx(sum(STEP_AFTER.values()) / 1e6)
        assert info.groupby("configuration")["share"].sum().tolist() == pytest.approx([1.0, 1.0])

    def test_categories_without_time_are_left_out_and_the_rest_is_in_the_order_of_groups(self) -> None:
        rows = get_breakdown_info(complete_study(), STUDY_ID)
        info = table(rows)
        today = info[info["configuration"] == "today"]
        assert "epoch_restart" not in set(today["category"])
        order = [GROUPS.index(group) for group in today["group"]]
        assert order == sorted(order)

    def test_several_starts_are_averaged(self) -> None:
        one = make_result("a", BASELINE, 1e7, breakdown={"host": 2_000_000})
        other = make_result("b", BASELINE, 1e7, breakdown={"host": 4_000_000, "optimizer": 1_000_000})
        assert mean_step_ms([one, other]) == {"host": 3.0, "optimizer": 0.5}

    def test_before_an_answer_the_last_accepted_candidate_stands_beside_today(self) -> None:
        trials, decisions = make_story()
        source = stored(make_study(state=StudyState.RUNNING), trials, decisions)
        assert {row.configuration for row in get_breakdown_info(source, STUDY_ID)} == {"today", "best so far"}

    def test_today_stands_alone_where_it_is_the_recommendation(self) -> None:
        trials, decisions = make_story()
        source = stored(make_study(), trials, decisions, without_gain())
        assert {row.configuration for row in get_breakdown_info(source, STUDY_ID)} == {"today"}

    def test_a_category_of_another_version_is_shown_under_its_own_name(self) -> None:
        result = make_result("a", BASELINE, 1e7, purpose=Purpose.BASELINE, breakdown={"warp": 2_000_000})
        rows = get_breakdown_info(stored(make_study(), make_trials([result])), STUDY_ID)
        info = table(rows)
        assert info[["category", "title", "group"]].to_numpy().tolist() == [["warp", "warp", "unknown"]]
        assert len(plot_breakdown(rows).data) == 1

    def test_side_by_side_a_missing_category_takes_no_time(self) -> None:
        times = dict(get_comparison_info(get_breakdown_info(complete_study(), STUDY_ID)))
        assert times["epoch_restart"] == (0.0, pytest.approx(0.06))

    def test_the_figure_has_one_bar_a_configuration_on_one_axis(self) -> None:
        rows = get_breakdown_info(complete_study(), STUDY_ID)
        figure = plot_breakdown(rows)
        assert figure.layout.barmode == "stack"
        drawn = {(y, trace.name): x for trace in figure.data for x, y in zip(trace.x, trace.y, strict=True)}
        assert drawn["today", "waiting for data"] == pytest.approx(15.8)
        assert sum(x for (y, _), x in drawn.items() if y == "recommended") == pytest.approx(10.29)

    def test_nothing_profiled_is_an_empty_figure(self) -> None:
        rows = get_breakdown_info(failed_study(), STUDY_ID)
        assert rows == []
        assert len(plot_breakdown(rows).data) == 0


class TestHistory:
    def test_gains_are_over_the_baseline(self) -> None:
        rows = get_history_info(complete_study(), STUDY_ID)
        info = table(rows).set_index("number")
        assert info.loc[5, "gain"] == pytest.approx(1 / 0.52, rel=0.02)
        assert info.loc[1, "gain"] == pytest.approx(1.0, abs=0.02)
        assert info.loc[1, "units_per_s"] == pytest.approx(BATCH * 1e9 / sum(STEP_BEFORE.values()), rel=0.02)

    def test_a_trial_that_ran_in_turns_is_compared_with_its_companion(self) -> None:
        """The machine became twice as slow for one group; the pair in it still shows the true ratio."""
        results = [
            make_result("a", BASELINE, 1e7, purpose=Purpose.BASELINE),
            make_result("b", BASELINE, 2e7, purpose=Purpose.CONFIRM, group="block"),
            make_result("c", WINNER, 1e7, purpose=Purpose.CONFIRM, group="block"),
        ]
        rows = get_history_info(stored(make_study(), make_trials(results)), STUDY_ID)
        info = table(rows)
        assert info["gain"].iloc[2] == pytest.approx(2.0, rel=0.02)

    def test_outcomes_follow_decisions_and_failures(self) -> None:
        rows = get_history_info(complete_study(), STUDY_ID)
        info = table(rows).set_index("number")
        assert info["outcome"].to_dict() == {
            **dict.fromkeys((1, 2, 3, 4), "baseline"),
            **dict.fromkeys((5, 6, 7, 10), "accepted"),
            8: "failed",
            9: "no_gain",
            **dict.fromkeys((11, 13, 15, 17, 19), "baseline"),
            **dict.fromkeys((12, 14, 16, 18, 20), "confirmed"),
        }
        assert set(info["outcome"]) <= set(LOOKS)
        assert math.isnan(info.loc[8, "gain"])
        assert info.loc[8, "note"].startswith("timeout in warm up: the warm_up phase")
        assert info.loc[8, "label"] == "compile: mode=default"

    def test_running_lost_and_rejected_trials_have_no_gain(self) -> None:
        rejected = replace(
            make_result("c", WINNER, 1e7), guard=GuardVerdict(passed=False, num_steps=8, losses=(math.nan,))
        )
        trials = make_trials([make_result("a", BASELINE, 1e7, purpose=Purpose.BASELINE), rejected])
        store = stored(make_study(), trials)
        store.begin_trials([sample_trial(study_id=STUDY_ID, trial_id="d", sequence=3)])
        rows = get_history_info(store, STUDY_ID)
        info = table(rows)
        assert info["outcome"].tolist() == ["baseline", "guard_rejected", "running"]
        assert info["gain"].isna().tolist() == [False, True, True]
        store.lose_running_trials(STUDY_ID)
        assert "lost" in get_history_info(store, STUDY_ID)[2].note

    def test_without_a_baseline_there_are_rates_but_no_gains(self) -> None:
        rows = get_history_info(stored(make_study(), make_trials([make_result("a", WINNER, 1e7)])), STUDY_ID)
        info = table(rows)
        assert info["gain"].isna().all()
        assert info["units_per_s"].iloc[0] == pytest.approx(3200, rel=0.02)

    def test_the_figure_shows_every_trial_and_says_what_was_changed(self) -> None:
        rows = get_history_info(complete_study(), STUDY_ID)
        info = table(rows)
        figure = plot_history(rows, SampleUnit.SAMPLE)
        assert sum(len(trace.x) for trace in figure.data) == len(info)
        hovers = [hover for trace in figure.data for hover in trace.customdata]
        assert any("samples/s" in hover and "num_threads=1" in hover for hover in hovers)


class TestGains:
    def test_each_part_has_its_own_gain_interval_and_limit(self) -> None:
        rows = get_gains_info(complete_study(), STUDY_ID)
        info = table(rows).set_index("strategy")
        part = info.loc["data_loading"]
        assert (part["gain"], part["low"], part["high"]) == (1.92, 1.87, 1.96)
        assert part["limit"] == pytest.approx(1 / (1 - 0.63))
        assert len(plot_gains(rows).data) == 2

    def test_parts_without_interval_or_bound_are_drawn_without_them(self) -> None:
        parts = tuple(replace(part, interval=None, bound=None) for part in make_recommendation().parts)
        rows = get_gains_info(stored(make_study(), recommendation=make_recommendation(parts=parts)), STUDY_ID)
        info = table(rows)
        assert info[["low", "high", "limit"]].isna().all().all()
        assert len(plot_gains(rows).data) == 1

    def test_without_a_recommendation_there_are_none(self) -> None:
        assert get_gains_info(failed_study(), STUDY_ID) == []


class TestStory:
    def test_tried_changes_have_prediction_and_measurement_on_one_scale(self) -> None:
        store = complete_study()
        row = get_tried_info(store, STUDY_ID, Effects(store.trials(STUDY_ID), store.recommendation(STUDY_ID)))[1]
        assert row.changed == "data_loading: num_workers=2, persistent_workers=on"
        assert row.limit == pytest.approx(2.70, abs=0.01)
        assert row.gain == pytest.approx(1.915, rel=0.02)
        assert row.low < row.gain < row.high < row.limit
        assert row.method == "search estimate"

    def test_what_was_not_tried_is_listed_once_with_its_reason(self) -> None:
        """Decisions and certificate say the same; one reason for many choices is one row."""
        many = [
            Decision(
                sequence=number,
                stage="end",
                verdict="not_tried",
                reason="needs CUDA",
                moves=(Move(strategy="precision", choice={"level": level}),),
            )
            for number, level in enumerate(("tf32", "O1", "tf32"), start=1)
        ]
        certificate = replace(make_recommendation().certificate, not_tried=tuple(many))
        source = stored(make_study(), (), many, make_recommendation(certificate=certificate))
        rows = get_not_tried_info(source, STUDY_ID)
        assert rows == [("precision", ("level=tf32", "level=O1"), "needs CUDA")]


class TestHeadline:
    def test_a_confirmed_gain_is_claimed_with_what_it_rests_on(self) -> None:
        headline = get_headline_info(complete_study(), STUDY_ID)
        facts = {fact.name: fact for fact in headline.facts}
        assert (headline.tone, headline.figure) == ("good", "2.42×")
        assert facts["95 % interval"].value == "2.37× to 2.47×"
        assert "2.34× to 2.50×" in facts["95 % interval"].note
        assert facts["Measured in"].value == "5 blocks"
        assert facts["Same training?"].value == "yes"
        assert facts["Peak memory"] == ("Peak memory", "1.43 GiB", "612 MiB today")

    def test_no_gain_is_a_plain_answer(self) -> None:
        headline = get_headline_info(stored(make_study(), recommendation=without_gain()), STUDY_ID)
        assert headline.title == "No significant gain"
        assert "Keep today's settings" in headline.sentence
        assert headline.facts[0] == ("Verdict", "no significant gain", "the interval does not exclude 1×")

    @pytest.mark.parametrize("state", StudyState)
    def test_without_an_answer_no_gain_is_claimed(self, state: StudyState) -> None:
        trials, decisions = make_story()
        headline = get_headline_info(stored(make_study(state=state, message="why"), trials, decisions), STUDY_ID)
        assert headline.figure == ""
        assert "why" in headline.sentence
        assert {fact.name: fact.note for fact in headline.facts}["Best so far"] == "not confirmed"

    def test_an_unconfirmed_gain_is_no_headline(self) -> None:
        unconfirmed = make_recommendation(verdict=Verdict.UNCONFIRMED, gain=None)
        headline = get_headline_info(stored(make_study(), recommendation=unconfirmed), STUDY_ID)
        assert (headline.figure, headline.title, headline.tone) == ("", "Not confirmed", "warning")

    def test_a_study_that_tried_nothing_says_so_and_what_it_takes(self) -> None:
        """Not "keep them": nothing is known."""
        r = without_gain(
            verdict=Verdict.NOT_SEARCHED,
            unproven_gain=None,
            needed_budget_s=211.0,
            no_time_for=("12 choices that each may still save up to 48% of the step",),
        )
        budget = get_headline_info(stored(make_study(), recommendation=r), STUDY_ID)
        assert (budget.figure, budget.title, budget.tone) == ("", "Not searched", "warning")
        assert "keep them" not in budget.sentence
        assert budget.sentence.endswith(f"Continue with `steptune resume {STUDY_ID} --budget 4m`.")
        assert {fact.name: fact.value for fact in budget.facts}["No time for"].startswith("12 choices")
        ended = replace(r, certificate=replace(r.certificate, ended="interrupted"), needed_budget_s=None)
        interrupted = get_headline_info(stored(make_study(), recommendation=ended), STUDY_ID)
        assert f"`steptune resume {STUDY_ID}`" in interrupted.sentence

    def test_an_open_answer_names_the_command_that_gives_it_more_time(self) -> None:
        """A resumed study keeps its trials, where a new one would repeat them."""
        study = replace(make_study(), settings=replace(make_study().settings, budget_s=600.0))
        low, high = 0.5, 4.5
        wide = Gain(
            ratio=1.5,
            interval=Interval(low=low, high=high),
            prediction=Interval(low=low, high=high),
            num_blocks=2,
            num_finalists=1,
        )
        for gain in (None, wide):
            r = without_gain(verdict=Verdict.INCONCLUSIVE, unproven_gain=gain)
            sentence = get_headline_info(stored(study, recommendation=r), STUDY_ID).sentence
            assert sentence.endswith(f"more time on a quiet machine: `steptune resume {STUDY_ID} --budget 5m`.")
        clear = without_gain(prospect="")
        assert more_time_command(study, clear) == ""
        assert more_time_command(study, replace(clear, prospect="The next minute would try more.")).endswith("5m")
        assert more_time_command(replace(study, state=StudyState.RUNNING), r) == ""

    def test_a_reader_of_a_service_with_logins_is_named_no_command_of_its_machine(self) -> None:
        """The page says what can be done there."""
        study = replace(make_study(), settings=replace(make_study().settings, budget_s=600.0))

        def sentence(r, study=study):
            return get_headline_info(stored(study, recommendation=r), STUDY_ID, at_service=True).sentence

        inconclusive = without_gain(verdict=Verdict.INCONCLUSIVE, unproven_gain=None)
        not_searched = replace(inconclusive, verdict=Verdict.NOT_SEARCHED, needed_budget_s=1200.0)
        stopped = replace(not_searched, certificate=replace(not_searched.certificate, ended="interrupted"))
        interrupted = replace(study, state=StudyState.INTERRUPTED)
        assert sentence(inconclusive).endswith("more time on a quiet machine: submit it again with a budget of 15m.")
        assert sentence(not_searched).endswith("Submit it again with a budget of 20m.")
        assert sentence(stopped, interrupted).endswith(
            "Users who may submit studies can resume this study on this page."
        )
        assert all("`" not in sentence(r) for r in (inconclusive, not_searched, stopped))

    def test_a_busy_machine_does_not_excuse_trials_of_a_script_that_take_no_turns(self) -> None:
        for workload, said in (
            ("examples/char_gpt.py:CharGPT", "took turns"),
            ("-- python train.py", "do not take turns"),
        ):
            r = make_recommendation(foreign_cpu_share=0.6)
            facts = get_headline_info(stored(make_study(workload=workload), recommendation=r), STUDY_ID).facts
            assert said in next(fact for fact in facts if fact.name == "Busy machine").note

    def test_runs_that_were_repeated_are_told_with_their_reason(self) -> None:
        killed = Failure(kind=FailureKind.CRASH, phase=Phase.WARM_UP, message="the process was killed by SIGKILL")
        attempt = Attempt(failure=killed, began_at="2026-11-21T10:00:00+00:00", duration_ns=1)
        trials, decisions = make_story()
        first = replace(trials[0], result=replace(trials[0].result, repeated=(attempt, attempt)))
        headline = get_headline_info(stored(make_study(), [first, *trials[1:]], decisions), STUDY_ID)
        repeated = next(fact for fact in headline.facts if fact.name == "Repeated")
        assert (repeated.value, repeated.note) == ("2 runs", "2 × the process was killed by SIGKILL")

    def test_enabling_training_has_no_ratio(self) -> None:
        enabling = make_recommendation(verdict=Verdict.ENABLES_TRAINING, gain=None, baseline_units_per_s=0.0)
        headline = get_headline_info(stored(make_study(), recommendation=enabling), STUDY_ID)
        assert headline.figure == ""
        assert "do not fit into memory" in headline.sentence


class TestUnits:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (units.significant(1284.1), "1,280"),
            (units.end_of_path("Net_0.Layer_0.Linear_3", 30), "Net_0.Layer_0.Linear_3"),
            (units.end_of_path("Net_0.Layer_0.Linear_3", 20), "….Layer_0.Linear_3"),
            (units.end_of_path("Net_0.Layer_0.Linear_3", 5), "….Linear_3"),
            (units.message_size(4096), "4 KiB"),
            (units.message_size(64 << 20), "64 MiB"),
            (units.significant(15.8), "15.8"),
            (units.significant(0.03417), "0.0342"),
            (units.significant(999.9), "1,000"),
            (units.significant(0), "0"),
            (units.significant(math.inf), "unknown"),
            (units.rate(1284.1, SampleUnit.TOKEN), "1,280 tokens/s"),
            (units.ratio(2.4178), "2.42×"),
            (units.ratio(1.0034), "1.003×"),
            (units.ratio(math.nan), "unknown"),
            (units.percent(0.634), "63 %"),
            (units.percent(0.008), "0.8 %"),
            (units.percent(0.0996), "10 %"),
            (units.duration(0.42), "0.42 s"),
            (units.duration(45.2), "45 s"),
            (units.duration(462), "7 min 42 s"),
            (units.duration(7500), "2 h 5 min"),
            (units.memory(612 << 20), "612 MiB"),
            (units.memory(80 << 30), "80.0 GiB"),
            (units.change(-14.5), "−14.50"),
            (units.counted(1, "trial"), "1 trial"),
            (units.ratio_interval(Interval(low=0.99, high=1.2)), "0.990× to 1.20×"),
            (units.ratio_interval(Interval(low=2e-6, high=254126.83)), "<0.01× to >100×"),
            (units.ratio_interval(Interval(low=0.01, high=100.0)), "0.01× to 100.00×"),
            (units.moves_label([Move(strategy="compile", choice={})]), "compile: as today"),
        ],
    )
    def test_numbers_have_units_and_no_more_digits_than_they_mean(self, text: str, expected: str) -> None:
        assert text == expected

    def test_a_bound_of_the_whole_step_limits_nothing(self) -> None:
        assert units.gain_limit(1.0) == math.inf
        assert units.gain_limit(0.5) == 2.0
        assert units.gain_limit(0.99992) == math.inf, "a limit of 12,500x says nothing"


# --- colours ----------------------------------------------------------------------------------

RED_GREEN_BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
}
"""Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision
deficiency" (2009), severity 1.0, on linear RGB."""
BLUE_YELLOW_BLINDNESS = np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]])
"""Tritanopia, from the same article: one person in ten thousand."""
DISTINCT = 11.0
"""Distance in CIELAB; 2.3 is the smallest that can be seen side by side."""
CLEARLY_DISTINCT = 16.0
"""Least distance of any two categories: a swatch of a legend is small, and stands away from its bar."""
EASILY_DISTINCT, GAPS_DISTINCT = 30.0, 20.0
"""Least distances of causes of gaps: with normal vision, and with colour blindness."""
PAPERS = {"light": "#ffffff", "dark": "#14171c"}
TOLD_APART_IN_GREY = 10.0
"""Difference of lightness between neighbours of a stacked bar."""


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(vision @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ seen / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


class TestColours:
    def test_every_category_has_its_own(self) -> None:
        assert set(theme.CATEGORY_COLOURS) == {info.category.value for info in CATEGORIES}
        assert len(set(theme.CATEGORY_COLOURS.values())) == len(CATEGORIES)

    @pytest.mark.parametrize("vision", RED_GREEN_BLINDNESS)
    def test_groups_are_told_apart_with_colour_blindness(self, vision: str) -> None:
        seen = {i: lab(theme.category_colour(i.category), RED_GREEN_BLINDNESS[vision]) for i in CATEGORIES}
        close = [
            (a.category.value, b.category.value)
            for a, b in itertools.combinations(CATEGORIES, 2)
            if a.group != b.group and np.linalg.norm(seen[a] - seen[b]) < DISTINCT
        ]
        assert close == []

    @pytest.mark.parametrize("vision", [*RED_GREEN_BLINDNESS, "tritanopia"])
    def test_any_two_categories_are_told_apart(self, vision: str) -> None:
        """Every category may stand beside every other in a chart."""
        seen_by, least = {**RED_GREEN_BLINDNESS, "tritanopia": BLUE_YELLOW_BLINDNESS}[vision], CLEARLY_DISTINCT
        if vision == "tritanopia":
            least = DISTINCT
        seen = {name: lab(colour, seen_by) for name, colour in theme.CATEGORY_COLOURS.items()}
        close = {
            (a, b): float(np.linalg.norm(seen[a] - seen[b]))
            for a, b in itertools.combinations(seen, 2)
            if np.linalg.norm(seen[a] - seen[b]) < least
        }
        assert close == {}

    @pytest.mark.parametrize("vision", [*RED_GREEN_BLINDNESS, "tritanopia"])
    def test_causes_of_gaps_are_told_apart_easily(self, vision: str) -> None:
        """A timeline has them in stripes of a pixel, side by side."""
        seen_by = {**RED_GREEN_BLINDNESS, "tritanopia": BLUE_YELLOW_BLINDNESS}[vision]
        seen = [lab(theme.category_colour(i.category), seen_by) for i in CATEGORIES if i.group == "gaps"]
        least = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))
        assert least >= (EASILY_DISTINCT if vision == "none" else GAPS_DISTINCT)

    @pytest.mark.parametrize("paper", PAPERS)
    def test_categories_stand_out_from_the_paper(self, paper: str) -> None:
        """The unknown category is hatched in tables, and has an edge in figures."""
        behind = lab(PAPERS[paper], np.eye(3))
        known = {name: colour for name, colour in theme.CATEGORY_COLOURS.items() if name != "unknown"}
        assert {n for n, c in known.items() if np.linalg.norm(lab(c, np.eye(3)) - behind) < DISTINCT} == set()
        assert PAPERS[paper] in asset_text("page.css")

    def test_neighbours_of_a_bar_are_told_apart_in_grey(self) -> None:
        lightness = [lab(theme.category_colour(i.category), np.eye(3))[0] for i in theme.categories_in_order()]
        assert min(abs(a - b) for a, b in itertools.pairwise(lightness)) > TOLD_APART_IN_GREY


# --- the report -------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags with their attributes, the visible text, scripts and data of figures of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.code: list[str] = []
        self.figures: list[str] = []
        self._inside = ""
        self._text = self.code
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self._text = self.figures if dict(attrs).get("type") == "application/json" else self.code
            self._text.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self._text[-1] += data
        elif self._inside != "style":
            self.text += " " + data


def sources() -> dict[str, MemoryStudyStore]:
    trials, decisions = make_story()
    return {
        "complete": complete_study(),
        "no_gain": stored(make_study(), trials, decisions, without_gain()),
        "unconfirmed": stored(
            make_study(), trials, decisions, make_recommendation(verdict=Verdict.UNCONFIRMED, gain=None, guard=None)
        ),
        "enables": stored(
            make_study(),
            trials[9:10],
            (),
            make_recommendation(verdict=Verdict.ENABLES_TRAINING, gain=None, baseline_units_per_s=0.0, parts=()),
        ),
        "running": running_study(7),
        "one_trial": running_study(1),
        "first_trial_running": running_study(0),
        "nothing_yet": stored(make_study(state=StudyState.RUNNING)),
        "failed": failed_study(),
        "other_version": stored(
            sample_study(study_id=STUDY_ID),
            [sample_trial(study_id=STUDY_ID, result=sample_result())],
            (),
            sample_recommendation(study_id=STUDY_ID),
        ),
    }


@pytest.fixture(scope="module")
def complete_page() -> Page:
    return Page(render_report(complete_study(), STUDY_ID))


class TestReport:
    @pytest.mark.parametrize("state", sources())
    def test_every_state_renders_with_the_questions_in_order(self, state: str) -> None:
        page = Page(render_report(sources()[state], STUDY_ID))
        found = [tag for tag, _ in page.tags]
        assert found.count("section") >= 5
        positions = [
            page.text.rindex(question)
            for question in (
                "Use it",
                "Search and trials",
                "Breakdown of a step",
                "Parts of the recommendation",
                "Remaining potential",
                "Hardware and software",
            )
        ]
        assert positions == sorted(positions)
        assert "nan" not in re.sub(r"\w*nan\w+|\w+nan\w*", "", page.text)

    def test_all_that_matters_is_on_the_page(self, complete_page: Page) -> None:
        text = " ".join(complete_page.text.split())
        for expected in (
            "2.42×",
            "2.37× to 2.47×",
            "1,280 samples/s with today's settings, 3,110 samples/s as recommended",
            "same for 8 steps",
            "input-bound: 63 % of the step waits for data",
            "pinned memory needs CUDA",
            "the update is one kernel",
            "2.13.0+cpu",
            "num_workers=0, persistent_workers=off → num_workers=2",
            'steptune.apply("steptune.json", workload)',
        ):
            assert expected in text

    def test_nothing_is_loaded_from_anywhere(self, complete_page: Page) -> None:
        """No element names another host, and the page forbids itself to connect."""
        for _, attributes in complete_page.tags:
            for name in ("src", "href", "action", "data", "poster", "srcset"):
                assert not re.match(r"\s*(https?:)?//", attributes.get(name) or "")
        policies = [a["content"] for _, a in complete_page.tags if a.get("http-equiv") == "Content-Security-Policy"]
        assert policies == ["default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"]
        assert "@import" not in complete_page.text
        assert complete_page.code[0] == get_plotlyjs()

    def test_exports_can_be_saved_from_the_page(self, complete_page: Page) -> None:
        links = [a for tag, a in complete_page.tags if tag == "a" and "download" in a]
        recommendation = complete_study().recommendation(STUDY_ID)
        exporters = exporters_for(recommendation)
        names = [exporter.file_name(recommendation) for exporter in exporters]
        assert [link["download"] for link in links] == [*names, "trials.csv"]
        for link, exporter in zip(links, exporters, strict=False):
            content = base64.b64decode(link["href"].partition("base64,")[2]).decode()
            assert content == exporter.export(recommendation)

    def test_variables_to_set_are_shown(self) -> None:
        recommendation = make_recommendation(Candidate(choices={"cpu_threads": {"bind": "close"}}))
        page = Page(render_report(stored(make_study(), recommendation=recommendation), STUDY_ID))
        assert "export OMP_PROC_BIND=close\nexport OMP_PLACES=cores" in page.text

    def test_the_same_study_gives_the_same_page(self) -> None:
        assert render_report(complete_study(), STUDY_ID) == render_report(complete_study(), STUDY_ID)

    def test_a_part_of_the_id_is_enough(self) -> None:
        assert study_context(complete_study(), STUDY_ID[:8], STANDALONE)["parts"]

    def test_today_shows_what_the_user_runs_and_not_what_pytorch_would(self) -> None:
        facts = replace(sample_study().facts, current={"data_loading": {"num_workers": 1}})
        study = make_study(facts=facts)
        context = study_context(stored(study, recommendation=make_recommendation()), STUDY_ID, STANDALONE)
        [row] = [row for row in context["changes"] if row.strategy == "data_loading"]
        assert row.today.startswith("num_workers=1")
        assert row.now.startswith("num_workers=2")


@pytest.fixture(scope="module")
def hostile_page() -> Page:
    """Every text that a user, a workload or another program can write is an attack."""
    candidate = Candidate(choices={HOSTILE: {HOSTILE: HOSTILE}, "data_loading": {"num_workers": HOSTILE}})
    failure = Failure(kind=FailureKind.CRASH, phase=Phase.BUILD, message=HOSTILE)
    results = [
        make_result(
            "a",
            BASELINE,
            1e7,
            purpose=Purpose.BASELINE,
            breakdown={HOSTILE: 1_000_000},
            findings=[replace(sample_result().findings[0], message=HOSTILE, advice=HOSTILE)],
        ),
        make_result("b", candidate, 5e6, breakdown={HOSTILE: 1_000_000}),
        make_result("c", candidate, 5e6, failure=failure),
    ]
    decision = Decision(
        sequence=1,
        stage=HOSTILE,
        verdict="accepted",
        reason=HOSTILE,
        candidate=candidate,
        moves=(Move(strategy=HOSTILE, choice={HOSTILE: HOSTILE}),),
        trial_ids=("b",),
    )
    decisions = [decision, replace(decision, sequence=2, verdict="not_tried", trial_ids=())]
    recommendation = make_recommendation(
        candidate,
        choices={HOSTILE: {HOSTILE: HOSTILE}},
        workload=HOSTILE,
        environment_variables={HOSTILE: HOSTILE},
        bottleneck_after=HOSTILE,
        parts=tuple(replace(part, strategy=HOSTILE, reason=HOSTILE) for part in make_recommendation().parts[:1]),
        hardware=replace(make_recommendation().hardware, cpu_name=HOSTILE, versions={HOSTILE: HOSTILE}),
    )
    study = make_study(workload=HOSTILE, message=HOSTILE, steptune_version=HOSTILE)
    return Page(render_report(stored(study, make_trials(results), decisions, recommendation), STUDY_ID))


class TestHostileText:
    def test_it_makes_no_element(self, hostile_page: Page) -> None:
        assert "img" not in [tag for tag, _ in hostile_page.tags]
        assert len(hostile_page.code) == 5  # plotly.js, and the four scripts of the page
        assert all(not name.startswith("on") for _, attributes in hostile_page.tags for name in attributes)

    def test_it_is_shown_as_text(self, hostile_page: Page) -> None:
        assert hostile_page.text.count(HOSTILE) >= 20

    def test_it_is_no_markup_for_figures(self, hostile_page: Page) -> None:
        """Plotly reads tags in texts; names come to it with their brackets escaped."""
        figures = [json.loads(text) for text in hostile_page.figures]
        texts = [text for figure in figures for text in strings(figure["data"]) if "onerror" in text]
        assert texts
        assert all("<img" not in text and "<script" not in text for text in texts)


def strings(value):
    """Every string inside plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def test_a_study_store_is_a_source() -> None:
    source: TrialSource = complete_study()
    assert source.get_study(STUDY_ID).study_id == STUDY_ID


def test_the_runner_up_is_listed_as_an_alternative(complete_page: Page) -> None:
    assert WORKERS_AND_THREADS.label in complete_page.text
