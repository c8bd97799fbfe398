"""The step timeline of every device, stream and thread, to be viewed at any zoom level.

`static/lanes.js` draws it. In a page of the service it requests tiles of the visible part; a self-contained page holds
all lanes, with events merged where there are more than it has room for.
"""

from __future__ import annotations

import base64
import gzip
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from markupsafe import Markup

from steptune.dashboards import theme, units
from steptune.dashboards.figures import in_element
from steptune.tuner.profiling.rank_comparison import main_rank
from steptune.tuner.profiling.tiles import LaneTables, shown_lanes
from steptune.tuner.trace_records import Lane, RankAnalysis, TraceAnalysis

EMBEDDED_CELLS = 300_000
"""Maximum number of timeline intervals embedded in a self-contained page: about two megabytes."""


class TimelineInfo(NamedTuple):
    """Data of the timeline on a page."""

    step_edges_ns: tuple[int, ...]
    """Start times of the steps of the rank shown, and the end of its last step, in nanoseconds."""
    path: str
    """Path below which tiles are requested; empty in a page that holds all lanes."""
    packed: str
    """All lanes as one tile: gzipped JSON in base64; empty where tiles are requested."""
    merged: bool
    """True where some of the drawn intervals merge several events."""
    num_left_out: int
    """Number of timeline lanes left out for lack of room."""

    @property
    def settings(self) -> Markup:
        """Return the settings that `static/lanes.js` reads in addition to the lanes, as text that is safe inside an
        HTML element.
        """
        kinds = {
            info.category.value: {
                "title": theme.kind_title(info.category.value),
                "colour": theme.category_colour(info.category.value),
                "text": theme.text_colour_on(theme.category_colour(info.category.value)),
            }
            for info in theme.categories_in_order()
        }
        return Markup(in_element({"steps": self.step_edges_ns, "path": self.path, "kinds": kinds}))


class LongGap(NamedTuple):
    """One of the longest gaps, for the list of gaps and for the keys that jump to a gap."""

    rank: int
    device: str
    start_ns: int
    end_ns: int
    length_ns: int
    category: str
    before: str
    after: str
    kernel_before: str
    kernel_after: str
    source: str
    module: str


def get_timeline_info(analysis: TraceAnalysis, max_cells: int = EMBEDDED_CELLS) -> TimelineInfo | None:
    """Return the timeline for a page that holds all lanes; None where there are no lanes."""
    lanes, left_out = shown_lanes(analysis)
    return with_lanes(main_rank(analysis), lanes, max_cells, left_out) if lanes else None


def with_lanes(
    rank: RankAnalysis, lanes: Sequence[Lane], max_cells: int = EMBEDDED_CELLS, num_left_out: int = 0
) -> TimelineInfo:
    """Return the timeline of these lanes, for a page that holds them."""
    tables = LaneTables(lanes)
    whole = tables.whole(max_cells)
    packed = base64.b64encode(gzip.compress(msgspec.json.encode(whole), 6, mtime=0)).decode()
    return TimelineInfo(step_edges_ns(rank), "", packed, not whole.exact, num_left_out)


def with_tiles(rank: RankAnalysis, path: str) -> TimelineInfo:
    """Return the timeline for a page of the service, which requests tiles."""
    return TimelineInfo(step_edges_ns(rank), path, "", merged=False, num_left_out=0)


def get_long_gaps_info(rank: RankAnalysis, top: int = 12) -> list[LongGap]:
    """Return the longest gaps of all devices of a rank, the longest first."""
    found = [
        LongGap(
            rank=rank.rank,
            device=device,
            start_ns=gap.start_ns,
            end_ns=gap.start_ns + gap.length_ns,
            length_ns=gap.length_ns,
            category=gap.category,
            before=gap.operator_before or units.kernel_name(gap.kernel_before),
            after=gap.operator_after or units.kernel_name(gap.kernel_after),
            kernel_before=gap.kernel_before,
            kernel_after=gap.kernel_after,
            source=gap.source,
            module=gap.module,
        )
        for device, stats in rank.gaps.items()
        for gap in stats.longest
    ]
    return sorted(found, key=lambda gap: -gap.length_ns)[:top]


def step_edges_ns(rank: RankAnalysis) -> tuple[int, ...]:
    """Return the start times of the steps and the end of the last step, in nanoseconds. They are the same for all
    devices.
    """
    steps = rank.breakdowns[0].steps
    lengths = [sum(step.values()) for step in steps] or [rank.breakdowns[0].step_time_ns]
    return tuple(itertools.accumulate(lengths, initial=0))
