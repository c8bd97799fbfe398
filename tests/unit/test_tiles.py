"""Tiles of a timeline: every event is in one that is close enough, and no tile is large."""

from __future__ import annotations

from collections import Counter

import pytest
from analysed import GEMM, write_loop
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from traces import needs_traces, trace_file

from steptune.tuner.profiling.analysis import analyse_traces
from steptune.tuner.profiling.lanes import FULL_CELLS
from steptune.tuner.profiling.tiles import FEW, MAX_LANES, WIDTHS, LaneTables, shown_lanes, with_at_most
from steptune.tuner.trace_records import Lane

PARTS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5000), st.integers(0, 2)), min_size=1, max_size=60)


def lane_of(parts, label="stream 7"):
    """Events of these distances, lengths and categories, each with a name of its own."""
    start, time = [], 0
    for gap, length, _ in parts:
        start.append(time + gap)
        time += gap + length
    return Lane(
        device="cuda:0",
        kind="stream",
        label=label,
        names=tuple(f"event {number}" for number in range(len(parts))),
        categories=("compute_matmul", "communication", "data_wait"),
        start_ns=tuple(start),
        length_ns=tuple(length for _, length, _ in parts),
        name=tuple(range(len(parts))),
        category=tuple(category for *_, category in parts),
        count=(1,) * len(parts),
        busy_ns=tuple(length for _, length, _ in parts),
    )


def looped(tmp_path, num_ranks=1):
    return analyse_traces(
        [write_loop(tmp_path / f"rank{n}.json", rank=n, num_ranks=num_ranks) for n in range(num_ranks)]
    )


@given(parts=PARTS, level=st.integers(0, 6))
def test_every_event_is_in_the_tiles_that_it_reaches_into(parts, level):
    lane = lane_of(parts)
    tables = LaneTables([lane])
    tiles = [tables.tile(level, number) for number in range(1 << level)]
    assert (tiles[0].low_ns, tiles[-1].high_ns) == (lane.start_ns[0], lane.start_ns[-1] + lane.length_ns[-1])
    assert [tile.low_ns for tile in tiles[1:]] == [tile.high_ns for tile in tiles[:-1]]
    events = list(zip(lane.names, lane.start_ns, lane.length_ns, strict=True))
    for tile in tiles:
        [found] = tile.lanes
        assert tile.exact
        names = [found.names[number] for number in found.name]
        here = [one for one in events if one[1] < tile.high_ns and one[1] + one[2] > tile.low_ns]
        assert list(zip(names, found.start_ns, found.length_ns, strict=True)) == here


def test_a_tile_of_many_events_is_merged_below_what_a_screen_shows_and_keeps_their_time():
    lane = lane_of([(3, 7, number % 3) for number in range(50_000)])
    tables = LaneTables([lane])
    tile = tables.tile(0, 0)
    [found] = tile.lanes
    assert not tile.exact
    assert len(found.start_ns) <= 3 * (WIDTHS + 1)
    width = (tile.high_ns - tile.low_ns) // WIDTHS
    assert max(found.length_ns) <= 2 * width
    times = Counter()
    for category, busy in zip(found.category, found.busy_ns, strict=True):
        times[category] += busy
    assert times == {category: 7 * len(range(category, 50_000, 3)) for category in range(3)}
    close = tables.tile(5, 9)
    assert close.exact
    assert FEW // 2 < len(close.lanes[0].start_ns) <= FEW


def test_the_longest_events_of_a_name_are_found_in_every_lane(tmp_path):
    lanes, _ = shown_lanes(looped(tmp_path))
    found = LaneTables(lanes).places(GEMM, 4)
    lengths = [place.length_ns for place in found]
    assert lengths == sorted(lengths, reverse=True)
    assert {place.lane for place in found} >= {"stream 7"}
    assert LaneTables(lanes).places("no such name", 4) == ()


def test_of_other_ranks_the_devices_are_shown_on_the_same_clock(tmp_path):
    """Their clocks are 7 us apart; collectives would say so."""
    analysis = looped(tmp_path, num_ranks=2)
    late = replace(analysis.ranks[1], first_step_ns=analysis.ranks[0].first_step_ns + 2_000)
    lanes, _ = shown_lanes(replace(analysis, ranks=(analysis.ranks[0], late), clock_offsets_ns={0: 0, 1: 5_000}))
    own, other = [lane for lane in lanes if lane.kind == "device"]
    assert (own.label, other.label) == ("rank 0 cuda:0", "rank 1 cuda:0")
    assert other.start_ns[0] - own.start_ns[0] == 7_000
    assert len([lane for lane in lanes if lane.kind != "device"]) == len(analysis.ranks[0].lanes) - 1


def test_rows_without_room_are_counted(tmp_path):
    analysis = looped(tmp_path)
    [rank] = analysis.ranks
    lanes, left_out = shown_lanes(replace(analysis, ranks=(replace(rank, lanes=rank.lanes * MAX_LANES),)))
    assert len(lanes) == MAX_LANES
    assert left_out == len(rank.lanes) * MAX_LANES - MAX_LANES


def test_a_lane_without_events_is_an_empty_row():
    empty = replace(lane_of([(0, 1, 0)]), start_ns=(), length_ns=(), name=(), category=(), count=(), busy_ns=())
    assert [len(lane.start_ns) for lane in LaneTables([empty]).tile(3, 2).lanes] == [0]
    assert LaneTables([empty]).whole(10).exact


def test_all_of_the_time_fits_into_a_page():
    lanes = [lane_of([(5, 5, number % 3) for number in range(20_000)], f"stream {n}") for n in range(2)]
    tables = LaneTables(lanes)
    assert tables.whole(40_000).exact
    whole = tables.whole(5_000)
    assert not whole.exact
    assert sum(len(lane.start_ns) for lane in whole.lanes) <= 5_000
    assert sum(sum(lane.busy_ns) for lane in whole.lanes) == 2 * 20_000 * 5
    assert with_at_most(lanes[0], 20_000) is lanes[0]
    assert len(with_at_most(lanes[0], 2_000).start_ns) <= 2_000


@needs_traces
@pytest.mark.parametrize("name", ["h200_swin_t_launch_bound", "kineto_resnet50_v100_workers0"])
def test_tiles_of_real_traces_are_small_at_every_level(name):
    lanes, _ = shown_lanes(analyse_traces([trace_file(name)], max_cells=FULL_CELLS))
    tables = LaneTables(lanes)
    assert tables.num_cells > 70_000
    for level in range(0, 12, 3):
        for number in {0, (1 << level) // 2, (1 << level) - 1}:
            assert all(len(lane.start_ns) < 6 * WIDTHS for lane in tables.tile(level, number).lanes)
