"""Treemap of compute: kernels by category, or a CPU's operators."""

from __future__ import annotations

from typing import NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.tuner.costs.categories import classify_operator
from steptune.tuner.trace_records import RankAnalysis

OTHER = "compute_other"


class Area(NamedTuple):
    """A kernel, or on a CPU an operator with all its shapes; times and runs are per step."""

    name: str
    short: str
    category: str
    ms: float
    num_runs: float


def get_treemap_info(rank: RankAnalysis) -> list[Area]:
    """Return one area for each name and category, the longest time first."""
    num_steps = rank.breakdowns[0].num_steps
    if rank.kernels:
        rows = [(k.name, units.kernel_name(k.name), k.category, k.total_ns, k.count) for k in rank.kernels]
    else:
        rows = [(o.name, o.name, classify_operator(o.name) or OTHER, o.device_ns, o.count) for o in rank.operators]
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for name, short, category, time_ns, count in rows:
        time_before, count_before = sums.get((name, short, category), (0, 0))
        sums[name, short, category] = time_before + time_ns, count_before + count
    areas = [Area(*key, time_ns / num_steps / 1e6, count / num_steps) for key, (time_ns, count) in sums.items()]
    return sorted((area for area in areas if area.ms > 0), key=lambda area: -area.ms)


def plot_treemap(info: list[Area]) -> Figure:
    """Draw a treemap of time per step, by category; a click zooms into a category."""
    totals: dict[str, float] = {}
    for area in info:
        totals[area.category] = totals.get(area.category, 0.0) + area.ms
    figure = theme.new_figure(height=420, margin={"l": 2, "r": 2, "t": 4, "b": 4})
    titles = [theme.plain(theme.kind_title(name)) for name in totals]
    colours = [
        theme.MUTED,
        *(theme.category_colour(name) for name in (*totals, *(area.category for area in info))),
    ]
    figure.add_treemap(
        ids=["all"] + [f"category {name}" for name in totals] + [f"kernel {number}" for number in range(len(info))],
        labels=["all", *titles] + [theme.plain(_short(area.short)) for area in info],
        parents=["", *["all"] * len(totals)] + [f"category {area.category}" for area in info],
        values=[sum(totals.values()), *totals.values(), *(area.ms for area in info)],
        customdata=[(title, "") for title in ("all", *titles)]
        + [(theme.wrapped(area.name, 80), f"<br>{units.significant(area.num_runs)} runs a step") for area in info],
        branchvalues="total",
        texttemplate="%{label}<br>%{value:.3f} ms",
        hovertemplate="%{customdata[0]}<br><b>%{value:.3f} ms</b> a step, %{percentRoot:.1%}%{customdata[1]}"
        "<extra></extra>",
        marker={"colors": colours, "line": {"width": 1, "color": "#ffffff"}, "pad": {"t": 22, "l": 3, "r": 3, "b": 3}},
        textfont={"color": [theme.text_colour_on(colour) for colour in colours], "size": 12},
        tiling={"pad": 2},
        maxdepth=3,
    )
    # Names that do not fit are left out: the pointer and the table tell them.
    figure.update_layout(uniformtext={"minsize": 10, "mode": "hide"})
    return figure


def _short(name: str, width: int = 22) -> str:
    """Shorten a name to fit into an area; its template arguments are left out."""
    name = name.partition("<")[0]
    return name if len(name) <= width else name[: width - 1] + "…"
