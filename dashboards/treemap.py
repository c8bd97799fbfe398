"""What computes, as areas: kernels by category, or a CPU's operators."""

from __future__ import annotations

import pandas as pd

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.tuner.profiling.categories import classify_operator
from steptune.tuner.trace_records import RankAnalysis

OTHER = "compute_other"


def get_treemap_info(rank: RankAnalysis) -> pd.DataFrame:
    """One row a kernel, or (on a CPU, which has none) an operator with all shapes together: `name`, `short`,
    `category`, `ms` and `count` per step; the most time first.
    """
    num_steps = rank.breakdowns[0].num_steps
    if rank.kernels:
        rows = [(k.name, units.kernel_name(k.name), k.category, k.total_ns, k.count) for k in rank.kernels]
    else:
        rows = [(o.name, o.name, classify_operator(o.name) or OTHER, o.device_ns, o.count) for o in rank.operators]
    info = pd.DataFrame(rows, columns=["name", "short", "category", "ns", "count"])
    info = info.groupby(["name", "short", "category"], sort=False, as_index=False).sum()
    info = info.assign(ms=info["ns"] / num_steps / 1e6, count=info["count"] / num_steps).drop(columns="ns")
    return info[info["ms"] > 0].sort_values("ms", ascending=False, kind="stable").reset_index(drop=True)


def plot_treemap(info: pd.DataFrame) -> Figure:
    """Areas by time per step, in categories; a click opens one."""
    totals = info.groupby("category", sort=False)["ms"].sum()
    figure = theme.new_figure(height=420, margin={"l": 2, "r": 2, "t": 4, "b": 4})
    ids = [f"category {name}" for name in totals.index] + [f"kernel {number}" for number in info.index]
    titles = [theme.plain(theme.kind_title(str(name))) for name in totals.index]
    categories = [*totals.index, *info["category"]]
    colours = [theme.category_colour(name) for name in categories]
    figure.add_treemap(
        ids=ids,
        labels=titles + [theme.plain(_short(name)) for name in info["short"]],
        parents=[""] * len(totals) + [f"category {name}" for name in info["category"]],
        values=[*totals, *info["ms"]],
        customdata=[(title, "") for title in titles]
        + [
            (theme.wrapped(str(name), 80), f"<br>{units.significant(count)} runs a step")
            for name, count in zip(info["name"], info["count"], strict=True)
        ],
        branchvalues="total",
        texttemplate="%{label}<br>%{value:.3f} ms",
        hovertemplate="%{customdata[0]}<br><b>%{value:.3f} ms</b> a step, %{percentRoot:.1%}%{customdata[1]}"
        "<extra></extra>",
        marker={"colors": colours, "line": {"width": 1, "color": "#ffffff"}, "pad": {"t": 22, "l": 3, "r": 3, "b": 3}},
        textfont={"color": [theme.text_colour_on(colour) for colour in colours], "size": 12},
        tiling={"pad": 2},
        maxdepth=2,
    )
    # Names that do not fit are left out: the pointer and the table tell them.
    figure.update_layout(uniformtext={"minsize": 10, "mode": "hide"})
    return figure


def _short(name: str, width: int = 22) -> str:
    """What fits into an area: without what a template was made for."""
    name = name.partition("<")[0]
    return name if len(name) <= width else name[: width - 1] + "…"
