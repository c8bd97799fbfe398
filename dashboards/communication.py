"""Communication between the ranks: how much of it compute hides, how fast it is, and which ranks wait for which."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.tuner.profiling.process_groups import hosts_of, reach
from steptune.tuner.records import CollectiveStats
from steptune.tuner.trace_records import TraceAnalysis

if TYPE_CHECKING:
    import pandas as pd


COLUMNS = (
    "collective",
    "name",
    "dtype",
    "group_size",
    "message_bytes",
    "count",
    "exposed_ms",
    "hidden_ms",
    "latency_ns",
    "skew_ns",
    "bus_bytes_per_s",
)
_HIDDEN = "#909050"


def get_communication_info(analysis: TraceAnalysis) -> pd.DataFrame:
    """Return one row for each collective and message size, the longest total time first. `count`, `exposed_ms` and
    `hidden_ms` are per step, and NaN where not known. Times are means over the ranks.
    """
    import pandas as pd

    num_steps = analysis.ranks[0].breakdowns[0].num_steps
    rows = [
        (
            f"{c.name} {units.memory(c.message_bytes)}" if c.message_bytes else c.name,
            c.name,
            c.dtype,
            c.group_size,
            c.message_bytes,
            c.count / num_steps,
            c.exposed_ns / num_steps / 1e6,
            max(0, c.total_ns - c.exposed_ns) / num_steps / 1e6,
            math.nan if c.latency_ns is None else float(c.latency_ns),
            math.nan if c.skew_ns is None else float(c.skew_ns),
            math.nan if c.bus_bytes_per_s is None else float(c.bus_bytes_per_s),
        )
        for c in sorted(analysis.collectives, key=lambda c: -c.total_ns)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


class GroupRow(NamedTuple):
    """Process groups of one size that call the same collectives. Figures are per step, averaged over the groups."""

    num_groups: int
    group_size: int
    reach: str
    collectives: str
    calls: float
    num_bytes: float
    exposed_ns: float
    hidden_ns: float


def get_groups_info(analysis: TraceAnalysis) -> list[GroupRow]:
    """Return one row for each set of process groups that have the same size, span the same number of hosts and call the
    same collectives; the most exposed time first. For example, a thousand ranks, sharded within hosts and replicated
    between them, make two rows. Return no rows if there is only one group.
    """
    known = [group for rank in analysis.ranks for group in rank.groups]
    num_steps = analysis.ranks[0].breakdowns[0].num_steps
    by_group: dict[tuple[str, int], list[CollectiveStats]] = {}
    for one in analysis.collectives:
        by_group.setdefault((one.group, one.group_size), []).append(one)
    alike: dict[tuple[int, str, str], list[list[CollectiveStats]]] = {}
    for (group, size), members in by_group.items():
        names = ", ".join(sorted({one.name for one in members}))
        alike.setdefault((size, reach(hosts_of(known, group)), names), []).append(members)
    rows = []
    for (size, where, names), groups in alike.items():
        members = [one for group in groups for one in group]
        per = 1 / (num_steps * len(groups))
        rows.append(
            GroupRow(
                num_groups=len(groups),
                group_size=size,
                reach=where,
                collectives=names,
                calls=per * sum(one.count for one in members),
                num_bytes=per * sum(one.count * one.message_bytes for one in members),
                exposed_ns=per * sum(one.exposed_ns for one in members),
                hidden_ns=per * sum(max(0, one.total_ns - one.exposed_ns) for one in members),
            )
        )
    return sorted(rows, key=lambda row: -row.exposed_ns) if len(by_group) > 1 else []


def plot_exposure(info: pd.DataFrame) -> Figure:
    """Draw one bar per collective: the exposed part and the part that compute hides."""
    figure = theme.new_figure(height=110 + 26 * len(info), barmode="stack", bargap=0.3)
    labels = [f"{number}. {theme.plain(str(name))}" for number, name in enumerate(info["collective"], 1)]
    for title, column, colour in (
        ("exposed: no compute runs meanwhile", "exposed_ms", theme.category_colour("communication")),
        ("hidden behind compute", "hidden_ms", _HIDDEN),
    ):
        figure.add_bar(
            name=title,
            orientation="h",
            y=labels,
            x=list(info[column]),
            marker={"color": colour, "line": {"width": 0}},
            customdata=[units.significant(value) for value in info["count"]],
            hovertemplate="%{fullData.name}<br><b>%{x:.3f} ms</b> a step in %{customdata} calls<extra>%{y}</extra>",
        )
    figure.update_xaxes(title={"text": "ms per step"})
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=6, tickfont={"size": 11})
    return figure


def plot_bandwidth(info: pd.DataFrame) -> Figure:
    """Plot bus bandwidth over message size, both logarithmic: small messages cannot be fast."""
    known = info[(info["message_bytes"] > 0) & (info["bus_bytes_per_s"] > 0)]
    figure = theme.new_figure(height=320)
    total = known["exposed_ms"] + known["hidden_ms"]
    symbols = ("circle", "square", "diamond", "triangle-up", "cross", "star")
    for number, name in enumerate(dict.fromkeys(known["name"])):
        rows = known[known["name"] == name]
        figure.add_scatter(
            name=theme.plain(str(name)),
            x=[value / (1 << 20) for value in rows["message_bytes"]],
            y=[value / 1e9 for value in rows["bus_bytes_per_s"]],
            mode="markers",
            marker={
                "symbol": symbols[number % len(symbols)],
                "size": [10 + 16 * math.sqrt(t / total.max()) for t in total[rows.index]],
                "color": theme.GOOD,
                "opacity": 0.8,
                "line": {"width": 1, "color": "#ffffff"},
            },
            customdata=[
                (units.memory(size), units.per_second(rate, "B"), units.significant(count))
                for size, rate, count in zip(rows["message_bytes"], rows["bus_bytes_per_s"], rows["count"], strict=True)
            ],
            hovertemplate="%{customdata[0]}: <b>%{customdata[1]}</b><br>%{customdata[2]} calls a step"
            "<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(type="log", title={"text": "message, MiB"})
    figure.update_yaxes(type="log", title={"text": "bus bandwidth, GB/s"})
    return figure


def plot_waits(ranks: pd.DataFrame) -> Figure:
    """Draw one bar per rank: the time per step for which it waits for other ranks. The rank that waits least is the
    straggler.

    Args:
        ranks: As `trace_info.get_ranks_info` gives them.
    """
    known = ranks[ranks["wait_ns"].notna()]
    figure = theme.new_figure(height=90 + 26 * len(known), bargap=0.3, showlegend=False)
    figure.add_bar(
        orientation="h",
        y=[f"rank {rank}" for rank in known["rank"]],
        x=[value / 1e6 for value in known["wait_ns"]],
        marker={"color": [theme.BAD if late else theme.NEUTRAL for late in known["straggler"]]},
        customdata=[units.percent(share) for share in known["late_share"]],
        hovertemplate="waits <b>%{x:.3f} ms</b> a step for other ranks;<br>enters %{customdata} of the collectives last"
        "<extra>%{y}</extra>",
    )
    figure.update_xaxes(title={"text": "ms per step waiting for other ranks"}, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=6)
    return figure
