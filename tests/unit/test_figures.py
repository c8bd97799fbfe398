"""Figures are plain data: Plotly, which checks names and values, knows every property of every one."""

from __future__ import annotations

import json
import math

import numpy as np
import plotly.graph_objects as go
import pytest
from report_builders import STUDY_ID, complete_study, running_study
from test_fleet import PARTS, STUDIES
from traces import FOLDER

from steptune.dashboards.figures import Figure
from steptune.dashboards.fleet import fleet_context
from steptune.dashboards.site import Site
from steptune.dashboards.study_page import study_context
from steptune.dashboards.trace_page import trace_figures
from steptune.tuner.profiling.analysis import analyse_traces


def check(text: str) -> None:
    drawn = json.loads(text)
    assert drawn["data"]
    go.Figure(drawn)  # refuses what it does not know


@pytest.mark.parametrize("store", [complete_study(), running_study(12)], ids=["complete", "running"])
def test_plotly_knows_all_of_a_studys_figures(store) -> None:
    figures = study_context(store, STUDY_ID, Site())["figures"]
    assert figures
    for text in figures.values():
        check(text)


def test_plotly_knows_all_of_the_overviews_figures() -> None:
    figures = fleet_context(STUDIES, PARTS)["figures"]
    assert set(figures) == {"limits", "strategies"}
    for text in figures.values():
        check(text)


@pytest.mark.parametrize("name", ["h200_swin_t_launch_bound", "kineto_resnet50_v100_workers0"])
def test_plotly_knows_all_of_a_profiles_figures(name) -> None:
    analysis = analyse_traces([FOLDER / f"{name}.json.gz"])
    figures = trace_figures(analysis)
    assert {"steps", "treemap", "kernels"} <= set(figures)
    for figure in figures.values():
        check(figure.to_json())


def test_what_plotly_does_not_know_is_refused_here() -> None:
    figure = Figure({})
    figure.add_bar(x=[1], colour="red")
    with pytest.raises(ValueError, match="colour"):
        check(figure.to_json())


class TestFigure:
    def test_objects_are_merged_and_lists_replaced(self) -> None:
        shared = {"title": {"font": {"size": 12}}, "tickvals": [1]}
        figure = Figure({"xaxis": shared, "yaxis": shared})
        figure.update_xaxes(title={"text": "ms"}, tickvals=[2])
        assert figure.layout.xaxis == {"title": {"font": {"size": 12}, "text": "ms"}, "tickvals": [2]}
        assert figure.layout.yaxis == shared

    def test_lines_reach_across(self) -> None:
        figure = Figure({})
        figure.add_vline(x=3, line={"width": 1})
        figure.add_hline(y=2, line={"width": 2})
        assert figure.layout.shapes == list(
            go.Figure()
            .add_vline(x=3, line={"width": 1})
            .add_hline(y=2, line={"width": 2})
            .to_dict()["layout"]["shapes"]
        )

    def test_numbers_of_numpy_are_numbers_and_what_is_none_is_null(self) -> None:
        figure = Figure({})
        figure.add_bar(x=[np.float64(math.nan), math.inf, np.float32(0.5), np.int64(3)], y=np.array(["a", None]))
        [bar] = json.loads(figure.to_json())["data"]
        assert bar == {"type": "bar", "x": [None, None, 0.5, 3], "y": ["a", None]}

    def test_arrays_of_floats_are_bytes_as_plotly_packs_them(self) -> None:
        values = np.array([[1.5, math.nan, -2.0]], dtype=np.float32)
        figure = Figure({})
        figure.add_heatmap(z=values)
        [ours] = json.loads(figure.to_json())["data"]
        [theirs] = go.Figure(go.Heatmap(z=values)).to_dict()["data"]
        assert ours["z"] == theirs["z"]

    def test_nothing_ends_the_element_around_it(self) -> None:
        figure = Figure({"title": {"text": "</script><!--"}})
        text = figure.to_json()
        assert "<" not in text
        assert json.loads(text)["layout"]["title"]["text"] == "</script><!--"
