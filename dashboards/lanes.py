"""The step timeline: what every device, stream and thread did, to be looked at as closely as one likes."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from steptune.dashboards import theme, units
from steptune.dashboards.figures import Figure
from steptune.dashboards.trace_info import main_rank
from steptune.tuner.trace_records import Lane, RankAnalysis, TraceAnalysis

MAX_LANES = 24
"""More rows than this nobody tells apart."""
MAX_CELLS = 60_000
"""What a browser draws at once without a pause, and what compresses to well below a megabyte."""
HEIGHTS = {"device": 1.5, "stream": 0.9, "thread": 0.9}
SPACE = 0.3
PIXELS = 30.0
NAME_WIDTH = 60
CELLS = ("start_ns", "gap_ns", "length_ns", "category", "name", "names", "num_events", "busy_ns")
"""Fields of a row that `static/lanes.js` reads."""
IntColumn = npt.NDArray[np.int64]


class LaneRow(NamedTuple):
    """A row of the timeline: spans one after another, by column. Stretches in which nothing ran lie between them."""

    label: str
    kind: str
    """"device", "stream" or "thread"."""
    start_ns: int
    """Start of the first span, from the beginning of the first step."""
    gap_ns: IntColumn
    """Time since the end of the span before; zero where they touch, and for the first span."""
    length_ns: IntColumn
    category: IntColumn
    """Index into `LanesInfo.categories`."""
    name: IntColumn
    """Index into `names`."""
    names: tuple[str, ...]
    """Short enough for a line, as plain text."""
    num_events: IntColumn
    busy_ns: IntColumn
    """Time in it in which something ran; zero of a single event, which fills it."""

    @property
    def end_ns(self) -> int:
        return int(self.start_ns + self.gap_ns.sum() + self.length_ns.sum())


class LanesInfo(NamedTuple):
    """The timeline as data."""

    rows: tuple[LaneRow, ...]
    categories: tuple[str, ...]
    step_edges_ms: tuple[float, ...]
    """Where the steps of the rank that is shown in full begin, and where its last one ends."""
    num_left_out: int
    """Rows that there is no room for."""


class LongGap(NamedTuple):
    """One of the longest gaps, for lists and keys that lead to it."""

    rank: int
    device: str
    start_ms: float
    end_ms: float
    length_ns: int
    category: str
    before: str
    after: str
    kernel_before: str
    kernel_after: str
    source: str


def get_lanes_info(analysis: TraceAnalysis) -> LanesInfo:
    """Everything of the rank that the page is about, and what the devices of the others did, on its clock."""
    main = main_rank(analysis)
    others = [rank for rank in analysis.ranks if rank is not main]
    several = len(analysis.ranks) > 1
    wanted = [(main, lane) for lane in main.lanes]
    wanted += [(rank, lane) for rank in others for lane in rank.lanes if lane.kind == "device"]
    shown = _that_fit(wanted)
    used = {name for _, lane in shown for name in lane.categories}
    known = [info.category.value for info in theme.categories_in_order() if info.category.value in used]
    categories = (*known, *sorted(used.difference(known)))
    return LanesInfo(
        rows=tuple(_row(analysis, main, rank, lane, categories, several) for rank, lane in shown),
        categories=categories,
        step_edges_ms=step_edges_ms(main),
        num_left_out=len(wanted) - len(shown),
    )


def get_long_gaps_info(rank: RankAnalysis, top: int = 12) -> list[LongGap]:
    """The longest gaps of all devices of a rank, the longest first."""
    found = [
        LongGap(
            rank=rank.rank,
            device=device,
            start_ms=gap.start_ns / 1e6,
            end_ms=(gap.start_ns + gap.length_ns) / 1e6,
            length_ns=gap.length_ns,
            category=gap.category,
            before=gap.operator_before or units.kernel_name(gap.kernel_before),
            after=gap.operator_after or units.kernel_name(gap.kernel_after),
            kernel_before=gap.kernel_before,
            kernel_after=gap.kernel_after,
            source=gap.source,
        )
        for device, stats in rank.gaps.items()
        for gap in stats.longest
    ]
    return sorted(found, key=lambda gap: -gap.length_ns)[:top]


def step_edges_ms(rank: RankAnalysis) -> tuple[float, ...]:
    """Where its steps begin, and where the last one ends; of all devices the same."""
    steps = rank.breakdowns[0].steps
    lengths = [sum(step.values()) for step in steps] or [rank.breakdowns[0].step_time_ns]
    return tuple(total / 1e6 for total in itertools.accumulate(lengths, initial=0))


def _that_fit(wanted: list[tuple[RankAnalysis, Lane]]) -> list[tuple[RankAnalysis, Lane]]:
    shown, num_cells = [], 0
    for rank, lane in wanted[:MAX_LANES]:
        num_cells += 2 * len(lane.start_ns)
        if num_cells > MAX_CELLS:
            break
        shown.append((rank, lane))
    return shown


def _row(
    analysis: TraceAnalysis,
    main: RankAnalysis,
    rank: RankAnalysis,
    lane: Lane,
    categories: tuple[str, ...],
    several: bool,
) -> LaneRow:
    start, length, category, count, busy = (
        np.array(column, dtype=np.int64)
        for column in (lane.start_ns, lane.length_ns, lane.category, lane.count, lane.busy_ns)
    )
    label = f"rank {rank.rank} {lane.label}" if several and lane.kind == "device" else lane.label
    if lane.kind == "stream" and len(rank.breakdowns) > 1:
        label = f"{lane.device} {label}"
    first = lane.start_ns[0] if lane.start_ns else 0
    return LaneRow(
        label=label,
        kind=lane.kind,
        start_ns=first + _clock(analysis, rank) - _clock(analysis, main),
        gap_ns=np.diff(start, prepend=first) - np.append(0, length)[: len(length)],
        length_ns=length,
        category=np.array([categories.index(name) for name in lane.categories], dtype=np.int64)[category],
        name=np.array(lane.name, dtype=np.int64),
        names=tuple(_short(name) for name in lane.names),
        num_events=count,
        busy_ns=np.where(count > 1, busy, 0),
    )


def _clock(analysis: TraceAnalysis, rank: RankAnalysis) -> int:
    return rank.first_step_ns + analysis.clock_offsets_ns.get(rank.rank, 0)


def _short(name: str) -> str:
    name = units.kernel_name(name)
    return theme.plain(name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…")


def plot_lanes(info: LanesInfo) -> Figure:
    """A row of cells a lane. Drag to zoom, shift and drag to move; `static/lanes.js` adds keys, buttons and names.

    It also makes the cells and what they say, from the columns in `meta`: ten thousand texts would be most of a page.
    """
    centres, top = [], 0.0
    figure = theme.new_figure(height=100, showlegend=False)
    for row in info.rows:
        height = HEIGHTS[row.kind]
        centres.append(top + height / 2)
        figure.add_heatmap(
            y=[top, top + height],
            meta={name: getattr(row, name) for name in CELLS},
            hovertemplate="%{text}<extra></extra>",
            coloraxis="coloraxis",
            hoverongaps=False,
            name=theme.plain(row.label),
        )
        top += height + SPACE
    top = max(top - SPACE, 1.0)
    _add_steps(figure, info.step_edges_ms, top)
    low, high = _range(info)
    figure.update_layout(
        height=round(top * PIXELS) + 50,
        minreducedheight=2,  # else plotly keeps 64 pixels of a single row from the axis below it
        dragmode="zoom",
        hovermode="closest",
        coloraxis=_colours(info.categories),
        meta={
            "kinds": [theme.plain(theme.kind_title(name)) for name in info.categories],
            "text_colours": [theme.text_colour_on(theme.category_colour(name)) for name in info.categories],
        },
    )
    figure.update_xaxes(
        fixedrange=False,
        showgrid=False,
        range=[low, high],
        minallowed=low,
        maxallowed=high,
        title={"text": "milliseconds from the first step's beginning"},
    )
    figure.update_yaxes(
        range=[top + 0.1, -0.1],
        tickvals=centres,
        ticktext=[theme.plain(row.label) for row in info.rows],
        showgrid=False,
        ticklabelstandoff=6,
        tickfont={"size": 11},
    )
    return figure


def _range(info: LanesInfo) -> tuple[float, float]:
    low = min([info.step_edges_ms[0], *(row.start_ns / 1e6 for row in info.rows)])
    return low, max([info.step_edges_ms[-1], *(row.end_ns / 1e6 for row in info.rows)])


def _add_steps(figure: Figure, edges_ms: tuple[float, ...], top: float) -> None:
    x = [value for edge in edges_ms for value in (edge, edge, None)]
    figure.add_scatter(
        x=x,
        y=[-0.1, top + 0.1, None] * len(edges_ms),
        mode="lines",
        line={"color": "#d6249f", "width": 1.5},
        hoverinfo="skip",
        name="steps",
    )


def _colours(categories: tuple[str, ...]) -> dict[str, object]:
    count = max(1, len(categories))
    colours = [theme.category_colour(name) for name in categories] or [theme.MUTED]
    scale = [(place / count, c) for number, c in enumerate(colours) for place in (number, number + 1)]
    return {"colorscale": scale, "cmin": -0.5, "cmax": count - 0.5, "showscale": False}
