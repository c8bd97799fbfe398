"""The links between the ranks of a study: measurements by message size, and the line fitted to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.tuner.network.collective_costs import ALL_REDUCE, bus_bytes_per_s, ring_ns
from steptune.tuner.network.finding import Level
from steptune.tuner.network.rank_order import examine_order
from steptune.tuner.records import CollectiveTiming, Link, Topology

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("link", "collective", "message_bytes", "duration_ns", "bus_bytes_per_s", "fitted_bus_bytes_per_s")
LINE = ALL_REDUCE
"""Collective whose fit is drawn; the fitted lines of other collectives nearly coincide with this one."""
_SYMBOLS = {"all_reduce": "circle", "all_gather": "square", "reduce_scatter": "diamond"}
_COLOURS = (theme.GOOD, theme.BAD, theme.NEUTRAL)


class LinkRow(NamedTuple):
    """One link. Its bandwidth is one-way: per rank inside a host, per host between hosts."""

    name: str
    kind: str
    num_ranks: int
    latency_ns: float
    call_ns: float
    bytes_per_s: float
    fit_residual: float


class LinksInfo(NamedTuple):
    """Links of a topology, in the form that an HTML page shows.

    Attributes:
        points: One row for each message that was timed; see `COLUMNS`.
        order: Warning where consecutive ranks are on different hosts; else empty.
        order_effect: Cost of that order.
    """

    rows: list[LinkRow]
    points: pd.DataFrame
    measured_at: str
    order: str
    order_effect: str


def get_links_info(topology: Topology) -> LinksInfo:
    """Return the distinct links, with their measurements; if several groups shared a link, its bus bandwidth is the sum
    over these groups.
    """
    import pandas as pd

    links = _links(topology)
    rows = [
        LinkRow(
            name=name,
            kind=link.kind,
            num_ranks=link.timings[0].num_ranks if link.timings else 0,
            latency_ns=link.latency_ns,
            call_ns=link.call_ns,
            bytes_per_s=link.bytes_per_s,
            fit_residual=link.fit_residual,
        )
        for name, link in links.items()
    ]
    points = [_point(name, link, timing) for name, link in links.items() for timing in link.timings]
    order = examine_order(topology.host_of_rank, topology.backend)
    amiss = order.level is not Level.OK
    return LinksInfo(
        rows=rows,
        points=pd.DataFrame(points, columns=list(COLUMNS)),
        measured_at=topology.measured_at,
        order=order.found if amiss else "",
        order_effect=f"{order.effect}; {order.fix}" if amiss else "",
    )


def _links(topology: Topology) -> dict[str, Link]:
    named = {"inside a host": topology.inside, "between hosts": topology.between}
    found = {name: link for name, link in named.items() if link is not None}
    return found if topology.whole in found.values() else {**found, "all ranks in one ring": topology.whole}


def _point(name: str, link: Link, timing: CollectiveTiming) -> tuple[str, str, int, int, float, float]:
    fitted_ns = ring_ns(timing.collective, timing.message_bytes, timing.num_ranks, link, link.num_sharing)
    rates = [
        link.num_sharing * bus_bytes_per_s(timing.collective, timing.message_bytes, timing.num_ranks, duration_ns)
        for duration_ns in (timing.duration_ns, fitted_ns)
    ]
    return (name, timing.collective, timing.message_bytes, timing.duration_ns, rates[0], rates[1])


def plot_links(info: LinksInfo) -> Figure:
    """Plot bus bandwidth over message size, both logarithmic: measurements as points, the fit of the all-reduce as a
    line.
    """
    figure = theme.new_figure(height=320)
    for colour, name in zip(_COLOURS, dict.fromkeys(info.points["link"]), strict=False):
        points = info.points[info.points["link"] == name]
        line = points[points["collective"] == LINE].sort_values("message_bytes")
        figure.add_scatter(
            name=f"{name}, fitted",
            x=[value / (1 << 20) for value in line["message_bytes"]],
            y=[value / 1e9 for value in line["fitted_bus_bytes_per_s"]],
            mode="lines",
            line={"color": colour, "width": 1.5},
            showlegend=False,
            hoverinfo="skip",
        )
        figure.add_scatter(
            name=name,
            x=[value / (1 << 20) for value in points["message_bytes"]],
            y=[value / 1e9 for value in points["bus_bytes_per_s"]],
            mode="markers",
            marker={
                "symbol": [_SYMBOLS.get(str(collective), "cross") for collective in points["collective"]],
                "size": 9,
                "color": colour,
                "line": {"width": 1, "color": "#ffffff"},
            },
            customdata=[
                (
                    units.words(str(row.collective)),
                    units.message_size(row.message_bytes),
                    units.short_time(row.duration_ns),
                    units.per_second(row.bus_bytes_per_s, "B"),
                )
                for row in points.itertuples()
            ],
            hovertemplate="%{customdata[0]} of %{customdata[1]} in %{customdata[2]}: <b>%{customdata[3]}</b>"
            "<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(type="log", title={"text": "message, MiB"})
    figure.update_yaxes(type="log", title={"text": "bus bandwidth, GB/s"})
    return figure
