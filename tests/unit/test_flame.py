"""Flame graphs: a bar is as wide as the time of what is inside of it, and stands below the one that called it."""

from __future__ import annotations

from pathlib import Path

from test_modules import TestSecondWindow as SecondWindow
from test_modules import training
from trace_events import write_trace
from traces import needs_traces, trace_file

from steptune.dashboards.flame import Bar, get_module_bars, get_stack_bars, plot_flame
from steptune.dashboards.trace_page import render_trace_page
from steptune.tuner.profiling.analysis import analyse_file, analyse_rank, analyse_traces
from steptune.tuner.profiling.flame import MAX_NODES
from steptune.tuner.trace_records import RankAnalysis


def paths_of(rank: RankAnalysis) -> dict[str, int]:
    """Time by path of names."""
    paths: list[str] = []
    for node in rank.stacks:
        paths.append(f"{paths[node.parent]} > {node.name}" if node.parent >= 0 else node.name)
    return dict(zip(paths, (node.time_ns for node in rank.stacks), strict=True))


def test_stacks_have_functions_modules_and_operators_with_the_time_inside_of_them(tmp_path: Path) -> None:
    found = paths_of(analyse_rank(write_trace(tmp_path / "trace.json", training())))
    inside = "Net_0 > net.py(7): forward"
    assert found["Net_0"] == found[inside] == 50_000
    assert found[f"{inside} > Linear_0 > aten::linear > aten::addmm"] == 30_000
    assert found[f"{inside} > Linear_1 > aten::addmm"] == 20_000
    assert found["aten::_fused_sgd_"] == 10_000
    backward = "autograd::engine::evaluate_function: AddmmBackward0"
    assert found[backward] == 100_000, "two gradients, one bar"
    assert found[f"{backward} > AddmmBackward0 > aten::mm"] == 40_000


def test_without_call_stacks_operators_are_nested(tmp_path: Path) -> None:
    events = [one for one in training() if one["cat"] != "python_function"]
    found = paths_of(analyse_rank(write_trace(tmp_path / "trace.json", events)))
    assert found["aten::linear > aten::addmm"] == 30_000
    assert found["aten::addmm"] == 20_000


def test_stacks_of_another_window_have_the_times_of_the_measured_one(tmp_path: Path) -> None:
    window = SecondWindow()
    analysis = analyse_file(window.measured(tmp_path), None, 20, window.detailed(tmp_path)).analysis
    assert paths_of(analysis)["Net_0"] == 2 * 50_000


def test_bars_of_modules_are_inside_of_those_around_them(tmp_path: Path) -> None:
    bars = get_module_bars(analyse_rank(write_trace(tmp_path / "trace.json", training())))
    assert [(bar.name, bar.parent) for bar in bars] == [("Net_0", -1), ("Linear_0", 0), ("Linear_1", 0)]
    assert [bar.ms for bar in bars] == [0.15, 0.09, 0.06]


def test_names_of_bars_are_text(tmp_path: Path) -> None:
    events = [{**one, "name": one["name"].replace("Linear_0", "<img src=x>")} for one in training()]
    rank = analyse_rank(write_trace(tmp_path / "trace.json", events))
    for bars in (get_module_bars(rank), get_stack_bars(rank)):
        assert any("<img" in bar.name for bar in bars)
        assert "<img" not in plot_flame(bars).to_json()


def test_one_bar_is_above_all_others() -> None:
    """Above several Plotly would draw one without a name, and complain of its colour."""
    several = [Bar("one", -1, 2.0, ""), Bar("inner", 0, 1.5, ""), Bar("other", -1, 3.0, "")]
    [flame] = plot_flame(several).data
    assert flame.labels == ["all", "one", "inner", "other"]
    assert flame.parents == ["", "0", "1", "0"]
    assert flame["values"] == [5.0, 2.0, 1.5, 3.0]
    assert plot_flame(several[:2]).data[0].labels == ["one", "inner"]


def test_the_page_has_both_flame_graphs(tmp_path: Path) -> None:
    page = render_trace_page(analyse_traces([write_trace(tmp_path / "trace.json", training())]))
    assert 'data-figure="by_stack"' in page
    assert 'data-figure="by_module"' in page


@needs_traces
def test_stacks_of_a_real_trace_are_few_and_never_wider_than_what_is_around_them() -> None:
    rank = analyse_rank(trace_file("kineto_resnet50_v100_workers0"))
    assert 20 < len(rank.stacks) <= MAX_NODES
    for node in rank.stacks:
        assert node.parent < 0 or node.time_ns <= rank.stacks[node.parent].time_ns
