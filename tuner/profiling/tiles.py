"""Lanes of all ranks of a run, and their tiles for drawing at any zoom level.

Tile `n` of level `l` is the nth of 2^l equal parts of the time. It has every event of its time if they are few;
otherwise events shorter than a thousandth of the tile are merged, because a screen cannot separate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from steptune.tuner.profiling.intervals import Ints
from steptune.tuner.profiling.lanes import MAX_LANES, Spans, merged, merged_below
from steptune.tuner.profiling.rank_comparison import main_rank
from steptune.tuner.trace_records import Lane, LaneTile, RankAnalysis, SpanPlace, TraceAnalysis

WIDTHS = 1024
"""Length of a tile, as a multiple of the minimum cell width."""
FEW = 2048
"""Maximum number of cells of a lane in a tile for the cells to be sent unmerged."""
MAX_LEVEL = 30


def shown_lanes(analysis: TraceAnalysis) -> tuple[tuple[Lane, ...], int]:
    """Return up to `MAX_LANES` lanes to show, and the number of lanes left out. The candidates are all lanes of the
    main rank and the device lanes of the other ranks, labelled and on the main rank's clock.
    """
    main = main_rank(analysis)
    others = [rank for rank in analysis.ranks if rank is not main]
    found = [_labelled(analysis, main, rank, lane) for rank in (main, *others) for lane in _of_rank(rank, rank is main)]
    return tuple(found[:MAX_LANES]), max(0, len(found) - MAX_LANES)


def _of_rank(rank: RankAnalysis, whole: bool) -> list[Lane]:
    return [lane for lane in rank.lanes if whole or lane.kind == "device"]


def _labelled(analysis: TraceAnalysis, main: RankAnalysis, rank: RankAnalysis, lane: Lane) -> Lane:
    label = lane.label
    if len(analysis.ranks) > 1 and lane.kind == "device":
        label = f"rank {rank.rank} {label}"
    if lane.kind == "stream" and len(rank.breakdowns) > 1:
        label = f"{lane.device} {label}"
    late = _clock(analysis, rank) - _clock(analysis, main)
    start = tuple(start + late for start in lane.start_ns) if late else lane.start_ns
    return replace(lane, label=label, start_ns=start)


def _clock(analysis: TraceAnalysis, rank: RankAnalysis) -> int:
    return rank.first_step_ns + analysis.clock_offsets_ns.get(rank.rank, 0)


@dataclass(frozen=True, kw_only=True)
class LaneTable:
    """Columns of a lane.

    Attributes:
        reach: int64, by cell: the latest end of the cells up to it.
    """

    lane: Lane
    spans: Spans
    reach: Ints

    @classmethod
    def of(cls, lane: Lane) -> LaneTable:
        start, length, category, name, count, busy = (
            np.array(column, dtype=np.int64)
            for column in (lane.start_ns, lane.length_ns, lane.category, lane.name, lane.count, lane.busy_ns)
        )
        end = start + length
        spans = Spans(start=start, end=end, category=category, name=name, count=count, busy_ns=busy)
        empty = replace(lane, start_ns=(), length_ns=(), category=(), name=(), count=(), busy_ns=())
        return cls(lane=empty, spans=spans, reach=np.maximum.accumulate(end) if len(end) else end)

    def between(self, low_ns: int, high_ns: int) -> Spans:
        """Return the cells that overlap a time interval, at their full length."""
        first = int(np.searchsorted(self.reach, low_ns, side="right"))
        last = int(np.searchsorted(self.spans.start, high_ns, side="left"))
        return taken(self.spans, slice(first, max(first, last)))

    def as_lane(self, spans: Spans) -> Lane:
        """Return a lane of these cells, with the names that they need."""
        used, name = np.unique(spans.name, return_inverse=True)
        return replace(
            self.lane,
            names=tuple(self.lane.names[number] for number in used.tolist()),
            start_ns=tuple(spans.start.tolist()),
            length_ns=tuple((spans.end - spans.start).tolist()),
            name=tuple(name.tolist()),
            category=tuple(spans.category.tolist()),
            count=tuple(spans.count.tolist()),
            busy_ns=tuple(spans.busy_ns.tolist()),
        )


def with_at_most(lane: Lane, max_cells: int) -> Lane:
    """Return the lane, merged if it has more than `max_cells` cells."""
    if len(lane.start_ns) <= max_cells:
        return lane
    table = LaneTable.of(lane)
    return table.as_lane(merged(table.spans, max_cells))


class LaneTables:
    """Lanes from which tiles are cut."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._tables = [LaneTable.of(lane) for lane in lanes]
        known = [table for table in self._tables if len(table.reach)]
        self.low_ns = min((int(table.spans.start[0]) for table in known), default=0)
        self.high_ns = max((int(table.reach[-1]) for table in known), default=0)
        self.num_cells = sum(len(table.reach) for table in known)

    def tile(self, level: int, number: int) -> LaneTile:
        """Return one tile of a level, which divides the time into 2^level equal parts."""
        extent = self.high_ns - self.low_ns
        low, high = (self.low_ns + (extent * place >> level) for place in (number, number + 1))
        width = max(1, (high - low) // WIDTHS)
        lanes, exact = [], True
        for table in self._tables:
            spans = table.between(low, high)
            if len(spans) > FEW:
                spans, exact = merged_below(spans, width), False
            lanes.append(table.as_lane(spans))
        return LaneTile(
            low_ns=low, high_ns=high, first_ns=self.low_ns, last_ns=self.high_ns, exact=exact, lanes=tuple(lanes)
        )

    def whole(self, max_cells: int) -> LaneTile:
        """Return one tile of the whole time, with about `max_cells` cells shared equally among the lanes."""
        fair = max_cells // max(1, len(self._tables))
        exact = self.num_cells <= max_cells
        return LaneTile(
            low_ns=self.low_ns,
            high_ns=self.high_ns,
            first_ns=self.low_ns,
            last_ns=self.high_ns,
            exact=exact,
            lanes=tuple(table.as_lane(table.spans if exact else merged(table.spans, fair)) for table in self._tables),
        )

    def places(self, name: str, top: int) -> tuple[SpanPlace, ...]:
        """Return the longest events with a name, the longest first."""
        found = []
        for table in self._tables:
            if name in table.lane.names:
                rows = np.flatnonzero(table.spans.name == table.lane.names.index(name))
                length = (table.spans.end - table.spans.start)[rows]
                for place in np.argsort(-length, kind="stable")[:top].tolist():
                    start = int(table.spans.start[rows[place]])
                    found.append(SpanPlace(lane=table.lane.label, start_ns=start, length_ns=int(length[place])))
        return tuple(sorted(found, key=lambda place: (-place.length_ns, place.start_ns))[:top])


def taken(spans: Spans, rows: slice) -> Spans:
    return Spans(
        start=spans.start[rows],
        end=spans.end[rows],
        category=spans.category[rows],
        name=spans.name[rows],
        count=spans.count[rows],
        busy_ns=spans.busy_ns[rows],
    )
