"""The overview of all studies, and what changed between two trials, as data."""

from __future__ import annotations

import math

import pytest
from report_builders import STEP_AFTER, STEP_BEFORE, WINNER, make_result, table

from steptune.dashboards.comparison import (
    by_state,
    get_comparison_headline,
    get_differences_info,
    get_explanation,
    get_settings_info,
    get_sides_info,
    plot_differences,
)
from steptune.dashboards.fleet import (
    NOT_RUN,
    FleetParts,
    FleetStudies,
    fleet_context,
    get_hardware_info,
    get_limits_info,
    get_strategies_info,
    median_interval,
    plot_limits,
    plot_strategies,
)
from steptune.tuner.profiling.trial_comparison import compare_trials
from steptune.tuner.records import BASELINE
from steptune.tuner.trace_records import Comparison, Difference, KernelDifference


def study(hardware="A", gain=None, before=None, after=None, verdict=None, seconds=3600.0) -> FleetStudies:
    verdict = verdict or ("faster" if gain else None)
    return FleetStudies(hardware, verdict, before, after, 1, seconds, (gain,) if gain else ())


STUDIES = [
    study(gain=2.0, before="input", after="compute"),
    study(gain=3.0, before="input", after="input"),
    study(verdict="no_significant_gain", before="compute", after="compute"),
    study(hardware="B", gain=1.2, before="host", after="compute", seconds=60.0),
    study(hardware=None),
]
PARTS = [
    FleetParts("data_loading", "input", 2, 3, (1.8, 2.2)),
    FleetParts("data_loading", "compute", 1, 1, ()),
    FleetParts("cuda_graph", "host", 1, 3, (1.4,)),
]


class TestFleet:
    def test_hardware_has_its_gains_limits_and_hours(self) -> None:
        rows = {row.hardware: row for row in get_hardware_info(STUDIES)}
        row = rows["A"]
        assert (row.num_studies, row.num_answers, row.num_faster) == (3, 3, 2)
        assert (row.gain, row.limit, row.device_hours) == (2.5, "input", 3.0)
        assert rows["B"].device_hours == pytest.approx(60 / 3600)
        assert rows[NOT_RUN].num_answers == 0
        assert math.isnan(rows[NOT_RUN].gain)

    def test_limits_are_counted_before_and_after(self) -> None:
        assert get_limits_info(STUDIES) == [
            ("A", "input", 2, 1),
            ("A", "compute", 1, 2),
            ("B", "host", 1, 0),
            ("B", "compute", 0, 1),
        ]

    def test_a_strategy_pays_where_it_is_part_of_answers(self) -> None:
        info = get_strategies_info(PARTS)
        assert info[0].strategy == "data_loading"
        rows = {(row.strategy, row.bottleneck): row for row in info}
        row, in_vain = rows["data_loading", "input"], rows["data_loading", "compute"]
        assert (row.num_studies, row.num_parts, row.gain) == (2, 2, 2.0)
        assert (in_vain.num_studies, in_vain.num_parts) == (1, 0)
        assert math.isnan(in_vain.gain)

    def test_a_median_has_an_interval_from_six_values_on(self) -> None:
        """The extremes of six hold the true median in 97 % of all samples; the second of either end of ten, in 98 %."""
        assert [math.isnan(end) for end in median_interval([1.0, 2.0, 3.0, 4.0, 5.0])] == [False, True, True]
        assert median_interval([6.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == (3.5, 1.0, 6.0)
        assert median_interval([float(n) for n in range(10)]) == (4.5, 1.0, 8.0)
        assert all(math.isnan(figure) for figure in median_interval([]))

    def test_sums_in_pieces_are_sums(self) -> None:
        """The database sums studies in blocks."""
        whole = [FleetParts("data_loading", "input", 3, 5, (1.2, 1.8, 2.2))]
        pieces = [
            FleetParts("data_loading", "input", 2, 3, (1.8, 2.2)),
            FleetParts("data_loading", "input", 1, 2, (1.2,)),
        ]
        assert get_strategies_info(pieces) == get_strategies_info(whole)

    def test_shares_in_the_figure_sum_to_a_hundred(self) -> None:
        figure = plot_limits(get_limits_info(STUDIES))
        sums: dict[tuple[str, str], float] = {}
        for trace in figure.data:
            for hardware, when, share in zip(*trace.y, trace.x, strict=True):
                sums[hardware, when] = sums.get((hardware, when), 0.0) + share
        assert list(sums.values()) == pytest.approx([100.0] * 4)

    def test_cells_without_a_gain_are_empty(self) -> None:
        heat = plot_strategies(get_strategies_info(PARTS)).data[0]
        cells = {(y, x): z for y, row in zip(heat.y, heat.z, strict=True) for x, z in zip(heat.x, row, strict=True)}
        assert cells["data loading", "input"] == 2.0
        assert cells["data loading", "compute"] is None

    def test_nothing_yet_is_no_figure(self) -> None:
        assert fleet_context([], [])["figures"] == {}
        assert fleet_context([study()], [])["figures"] == {}


@pytest.fixture
def comparison() -> Comparison:
    before = make_result("a", BASELINE, float(sum(STEP_BEFORE.values())), breakdown=STEP_BEFORE, seed=1)
    after = make_result("b", WINNER, float(sum(STEP_AFTER.values())), breakdown=STEP_AFTER, seed=2)
    return compare_trials(before, after, labels=("A", "B"))


class TestComparison:
    def test_the_headline_is_the_measured_step(self, comparison: Comparison) -> None:
        headline = get_comparison_headline(comparison)
        assert (headline.tone, headline.title) == ("good", "B is faster than A")
        assert headline.figure == "2.42×"
        assert "one run each, without the profiler" in headline.sentence

    def test_noise_is_no_difference(self) -> None:
        step = Difference(name="step", before_ns=100.0, after_ns=99.0, low_ns=-3.0, high_ns=1.0)
        headline = get_comparison_headline(
            Comparison(before="A", after="B", num_steps=(9, 9), step=step, categories=(step,))
        )
        assert headline.title == "No difference beyond noise"

    def test_changes_sum_to_the_change_of_the_step(self, comparison: Comparison) -> None:
        rows = get_differences_info(comparison)
        info = table(rows)
        assert info["change_ms"].sum() == pytest.approx(comparison.step.change_ns / 1e6)
        assert info["share"].sum() == pytest.approx(1.0)
        assert info["category"].iloc[0] == "data_wait"
        assert len(plot_differences(rows).data[0].x) == len(info)

    def test_the_largest_categories_explain_it(self, comparison: Comparison) -> None:
        assert get_explanation(comparison)[0].startswith("waiting for data: −14.5 ms, 99 % of the change")

    def test_both_steps_are_whole(self, comparison: Comparison) -> None:
        sums = table(get_sides_info(comparison)).groupby("configuration")["ms_per_step"].sum()
        assert sums["A"] == pytest.approx(sum(STEP_BEFORE.values()) / 1e6)
        assert sums["B"] == pytest.approx(sum(STEP_AFTER.values()) / 1e6)

    def test_settings_that_differ_are_named(self) -> None:
        rows = get_settings_info(BASELINE, WINNER)
        assert [row.strategy for row in rows] == ["cpu_threads", "data_loading", "optimizer_implementation"]
        assert {row.before for row in rows} == {"as today"}

    def test_kernels_that_appeared_and_vanished_are_apart(self) -> None:
        def kernel(name, before, after):
            return KernelDifference(
                name=name, category="host", before_ns=before, after_ns=after, before_count=before, after_count=after
            )

        groups = by_state((kernel("a", 1, 0), kernel("b", 0, 1), kernel("c", 1, 2)))
        assert {title: [row.name for row in rows] for title, rows in groups.items()} == {
            "Appeared": ["b"],
            "Vanished": ["a"],
            "Changed": ["c"],
        }
