"""Tracks for Perfetto: exact, beside the trace's own events, in its way nowhere."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from decimal import Decimal
from itertools import pairwise

import pytest
from analysed import loop_events, write_loop
from breakdowns import analyse
from trace_events import kernel, operator, step, write_trace
from traces import needs_traces, trace_file

from steptune.tuner.costs.categories import INFO
from steptune.tuner.profiling.perfetto import CATEGORY, FIRST_PID, write_perfetto
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import TraceError


def loaded(path):
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text, parse_float=Decimal)


def ours(data):
    return [e for e in data["traceEvents"] if e.get("cat") == CATEGORY]


def tracks(data):
    """Our events by the names of process and thread."""
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"]
        for e in data["traceEvents"]
        if e["ph"] == "M" and isinstance(e["pid"], int) and e["pid"] >= FIRST_PID and "name" in e["args"]
    }
    found = {}
    for e in ours(data):
        process, thread = names["process_name", e["pid"], 0], names["thread_name", e["pid"], e["tid"]]
        found.setdefault((process.removeprefix("Steptune: "), thread), []).append(e)
    return found


def sums_ns(events):
    totals = Counter()
    for e in events:
        totals[e["name"]] += int(e["dur"] * 1000)
    return totals


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_the_trace_passes_through_and_the_tracks_sum_to_the_breakdown(tmp_path, name):
    source, target = write_loop(tmp_path / "trace.json"), tmp_path / name
    write_perfetto([source], target)
    data = loaded(target)
    theirs = [e for e in data["traceEvents"] if e["pid"] == 100]
    assert theirs == loaded(source)["traceEvents"]
    [breakdown] = analyse(read_trace(source))
    lines = tracks(data)
    expected = {INFO[n].title: value for n, value in breakdown.categories.items() if value}
    assert sums_ns(lines["cuda:0", "time categories"]) == expected
    assert sums_ns(lines["cuda:0", "phase"]) == {n: value for n, value in breakdown.phases.items() if value}
    steps = lines["cuda:0", "steps"]
    assert [e["name"] for e in steps] == ["step 1", "step 2", "step 3"]
    assert sum(int(e["dur"] * 1000) for e in steps) == breakdown.step_time_ns


def test_segments_tile_the_steps_on_the_trace_s_own_clock(tmp_path):
    source, target = write_loop(tmp_path / "trace.json"), tmp_path / "out.json"
    write_perfetto([source], target)
    segments = tracks(loaded(target))["cuda:0", "time categories"]
    assert segments[0]["ts"] == min(e["ts"] for e in loop_events())
    for one, following in pairwise(segments):
        assert one["ts"] + one["dur"] == following["ts"]


def test_nanoseconds_stay_exact_at_the_size_of_real_clocks(tmp_path):
    """At 4e12 microseconds floating-point numbers are a nanosecond apart, at 1.7e15 hundreds."""
    start = 1_790_857_026_000_000
    events = [step(0, start, start + 100), operator("aten::mm", start + 10, start + 20)]
    target = tmp_path / "out.json"
    write_perfetto([write_trace(tmp_path / "trace.json", events)], target)
    assert [e["ts"] for e in tracks(loaded(target))["cpu", "steps"]] == [Decimal(start)]


def test_long_gaps_are_named_after_what_most_of_them_is_blamed_on(tmp_path):
    source, target = write_loop(tmp_path / "trace.json", wait_us=400), tmp_path / "out.json"
    write_perfetto([source], target, long_gap_ns=300_000)
    gaps = tracks(loaded(target))["cuda:0", "long gaps"]
    assert {e["name"] for e in gaps} == {"gap: waiting for data"}
    for gap in gaps:
        causes = [value for name, value in gap["args"].items() if name.endswith("(ns)")]
        assert sum(causes) == int(gap["dur"] * 1000) >= 300_000
        assert gap["args"]["ended by"] == "Memcpy HtoD (Pageable -> Device)"


def test_the_written_file_analyses_to_the_same(tmp_path):
    """Our events are not taken for the device's."""
    source, target = write_loop(tmp_path / "trace.json"), tmp_path / "out.json.gz"
    write_perfetto([source], target)
    again = analyse(read_trace(target))
    assert [b.categories for b in again] == [b.categories for b in analyse(read_trace(source))]


def test_a_bare_list_of_events_is_written_into_as_well(tmp_path):
    source = tmp_path / "trace.json"
    source.write_text(json.dumps(loop_events()))
    write_perfetto([source], tmp_path / "out.json")
    data = loaded(tmp_path / "out.json")
    assert [e for e in data if e["pid"] == 100] == loaded(source)
    assert any(e.get("cat") == CATEGORY for e in data)


def test_several_ranks_stand_beside_each_other_on_one_clock(tmp_path):
    """Rank 1's file counts from a base 2 ms later: its equal times are 2 ms later."""
    base = 1_790_857_026_000_000_000
    sources = []
    for rank in range(2):
        top = {
            "distributedInfo": {"rank": rank, "world_size": 2},
            "baseTimeNanoseconds": base + rank * 2_000_000,
        }
        sources.append(write_trace(tmp_path / f"rank{rank}.json", loop_events(), **top))
    write_perfetto(sources, tmp_path / "out.json", clock_offsets_ns={1: 500})
    data = loaded(tmp_path / "out.json")
    first, second = (tracks(data)[f"rank {rank} cuda:0", "steps"][0]["ts"] for rank in range(2))
    assert second - first == Decimal("2000.5")
    assert len(ours(data)) == len([e for e in data["traceEvents"] if e["ph"] == "X"])
    assert data["baseTimeNanoseconds"] == base


def test_devices_have_free_process_numbers_of_their_own(tmp_path):
    events = [*loop_events(), kernel("gemm", 5100, 5200, device=1), {"ph": "M", "name": "x", "pid": "Spans", "tid": 0}]
    target = tmp_path / "out.json"
    write_perfetto([write_trace(tmp_path / "trace.json", events)], target)
    data = loaded(target)
    assert {process for process, _ in tracks(data)} == {"cuda:0", "cuda:1"}
    numbers = {e["pid"] for e in ours(data)}
    assert len(numbers) == 2
    assert not numbers & {e["pid"] for e in data["traceEvents"] if e.get("cat") != CATEGORY and e["ph"] == "X"}


def test_a_trace_is_not_overwritten(tmp_path):
    source = write_loop(tmp_path / "trace.json")
    before = source.read_bytes()
    with pytest.raises(TraceError, match="is the trace itself: write to another file"):
        write_perfetto([source], tmp_path / "." / "trace.json")
    assert source.read_bytes() == before


def test_a_target_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"out\.json cannot be written: No such file"):
        write_perfetto([write_loop(tmp_path / "trace.json")], tmp_path / "nowhere" / "out.json")


@needs_traces
@pytest.mark.parametrize("name", ["h200_resnet18_input_bound_w0", "hta_job128_rank0"])
def test_a_real_trace_passes_through(tmp_path, name):
    source = trace_file(name)
    write_perfetto([source], tmp_path / "out.json.gz")
    data, original = loaded(tmp_path / "out.json.gz"), loaded(source)
    assert data["traceEvents"][-len(original["traceEvents"]) :] == original["traceEvents"]
    assert {k: v for k, v in data.items() if k != "traceEvents"} == {
        k: v for k, v in original.items() if k != "traceEvents"
    }
