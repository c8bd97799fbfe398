"""Flame graphs: time by module, and by call stack. The root is at the top, and callees are below their callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.tuner.costs.categories import classify_operator
from steptune.tuner.trace_records import RankAnalysis

BACKWARD_NAME = "autograd::engine::evaluate_function: "


class Bar(NamedTuple):
    """One bar of a flame graph. Its time is per step and includes its callees; `parent` is an index, or -1."""

    name: str
    parent: int
    ms: float
    category: str
    """Category of an operator; empty for a function or module."""


def get_module_bars(rank: RankAnalysis) -> list[Bar]:
    """Return one bar for each module, nested like the modules. A module without time, or whose parent has no bar, is
    left out.
    """
    place: dict[str, int] = {}
    bars: list[Bar] = []
    for module in sorted(rank.modules, key=lambda one: one.name.count(".")):
        outer, _, own = module.name.rpartition(".")
        time_ns = module.forward_ns + module.backward_ns
        if (outer and outer not in place) or not time_ns:
            continue
        place[module.name] = len(bars)
        bars.append(Bar(own, place.get(outer, -1), _ms(rank, time_ns), ""))
    return bars


def get_stack_bars(rank: RankAnalysis) -> list[Bar]:
    """Return bars of functions, modules and operators, nested by caller."""
    return [
        Bar(
            node.name.removeprefix(BACKWARD_NAME),
            node.parent,
            _ms(rank, node.time_ns),
            (classify_operator(node.name) or "") if "::" in node.name else "",
        )
        for node in rank.stacks
    ]


def _ms(rank: RankAnalysis, time_ns: int) -> float:
    return time_ns / rank.breakdowns[0].num_steps / 1e6


def _below_one(bars: Sequence[Bar]) -> Sequence[Bar]:
    """Put several roots below a single new one, and return all bars. Otherwise Plotly would add a root without a name
    or colour.
    """
    tops = [bar.ms for bar in bars if bar.parent < 0]
    if len(tops) < 2:
        return bars
    return [Bar("all", -1, sum(tops), ""), *(bar._replace(parent=bar.parent + 1) for bar in bars)]


def plot_flame(bars: Sequence[Bar]) -> Figure:
    """Draw a flame graph. A click on a bar zooms into it; a click on the root zooms out."""
    bars = _below_one(bars)
    depth: list[int] = []
    for bar in bars:
        depth.append(1 + (depth[bar.parent] if bar.parent >= 0 else 0))
    figure = theme.new_figure(height=80 + 26 * max(depth), margin={"l": 2, "r": 2, "t": 4, "b": 4})
    colours = [theme.category_colour(bar.category) if bar.category else theme.MUTED for bar in bars]
    figure.add_icicle(
        ids=[str(number) for number in range(len(bars))],
        labels=[theme.plain(bar.name if len(bar.name) <= 80 else f"{bar.name[:79]}…") for bar in bars],
        parents=[str(bar.parent) if bar.parent >= 0 else "" for bar in bars],
        values=[bar.ms for bar in bars],
        customdata=[(theme.wrapped(bar.name, 80), units.milliseconds(bar.ms)) for bar in bars],
        branchvalues="total",
        texttemplate="%{label}",
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]} a step, %{percentParent:.1%} of the caller"
        "<extra></extra>",
        marker={"colors": colours, "line": {"width": 1, "color": "#ffffff"}},
        textfont={"color": [theme.text_colour_on(colour) for colour in colours], "size": 12},
        tiling={"orientation": "v", "pad": 0},
        leaf={"opacity": 1},
    )
    figure.update_layout(uniformtext={"minsize": 10, "mode": "hide"})
    return figure
