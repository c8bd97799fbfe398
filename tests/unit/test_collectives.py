"""The collectives of one rank, and of several ranks side by side."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from analysed import make_breakdown
from trace_events import OTHER, Event, event, launched, operator, runtime, step, trace_of
from traces import needs_traces, trace_file

from steptune.tuner.costs.categories import PRIORITY, Category
from steptune.tuner.profiling.capture import link
from steptune.tuner.profiling.collectives import (
    CollectiveCalls,
    Message,
    bus_bandwidth,
    collective_calls,
    collective_stats,
)
from steptune.tuner.profiling.communication import collective_name
from steptune.tuner.profiling.cpu_time import cpu_time
from steptune.tuner.profiling.device_time import device_time
from steptune.tuner.profiling.intervals import union
from steptune.tuner.profiling.rank_comparison import compare_ranks, late_part, straggler
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import Trace
from steptune.tuner.trace_records import RankWait

MS = 1_000_000
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
WORLD = {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 4}}


def calls_of(trace: Trace) -> CollectiveCalls:
    capture = link(trace)
    if not capture.device_numbers:
        return collective_calls(capture, cpu_time(capture), None)
    device = capture.device_numbers[0]
    return collective_calls(capture, device_time(capture, device)[0], device)


def all_reduce(call: float, start: float, end: float, number: int, elements: int = 1000, **more: Any) -> list[Event]:
    """A recorded all-reduce as new traces have it: `record_param_comms`, its launch and its kernel."""
    said = {
        "Collective name": "allreduce",
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "dtype": "Float",
        "Group size": 4,
        "Process Group Name": "0",
        **more,
    }
    ids = {"External id": 1000 + number}
    return [
        event("cpu_op", "record_param_comms", call, call + 4, **said, **ids),
        runtime("cudaLaunchKernelExC", call + 1, call + 2, number),
        event("kernel", REDUCE, start, end, 20, correlation=number, device=0, stream=20, **ids),
    ]


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("allreduce", "all_reduce"),
        (REDUCE, "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_Reduce_Sum_f32", "reduce"),
        ("all_to_allv", "all_to_all"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "send_recv"),
        ("broadcast", "broadcast"),
        ("recv", "recv"),
        ("a new one", "a new one"),
    ],
)
def test_collectives_have_one_name(spelt, name):
    assert collective_name(spelt) == name


def test_size_time_and_bandwidth_of_a_recorded_collective(tmp_path):
    """4000 bytes among 4 ranks in 30 us: 4000 * 1.5 / 30 us = 200 MB/s; 10 of 30 us run beside a product."""
    events = [
        step(1, 0, 100),
        *launched("volta_sgemm", 1, 10, 30, 1),
        *all_reduce(5, 20, 50, 2),
        *launched("volta_sgemm", 8, 60, 100, 3),
    ]
    (stats,) = collective_stats(calls_of(trace_of(tmp_path, events, **WORLD)))
    assert (stats.name, stats.group, stats.group_size, stats.dtype) == ("all_reduce", "0", 4, "Float")
    assert (stats.message_bytes, stats.count) == (4000, 1)
    assert (stats.total_ns, stats.exposed_ns) == (30_000, 20_000)
    assert stats.bus_bytes_per_s == pytest.approx(2e8)
    assert (stats.latency_ns, stats.skew_ns) == (None, None)


def test_kernels_of_one_record_are_one_collective(tmp_path):
    events = [step(1, 0, 100), *all_reduce(5, 20, 50, 2)]
    second = event("kernel", REDUCE, 50, 60, 20, correlation=9, device=0, stream=20, **{"External id": 1002})
    calls = calls_of(trace_of(tmp_path, [*events, second], **WORLD))
    assert (len(calls), calls.start.tolist(), calls.end.tolist()) == (1, [20_000], [60_000])
    assert calls.busy_ns.tolist() == [40_000]


def test_without_records_the_annotation_around_the_launch_names_the_collective(tmp_path):
    """Old traces: an all-to-all is many send-and-receive kernels."""
    send = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)"
    events = [
        step(1, 0, 100),
        event("user_annotation", "nccl:all_to_all", 4, 20, **{"Input Dims": [[256], []], "Input type": ["float", ""]}),
        *launched(send, 5, 20, 30, 1),
        *launched(send, 8, 30, 50, 2),
        *launched(send, 40, 60, 70, 3),
    ]
    calls = calls_of(trace_of(tmp_path, events, **WORLD))
    assert [(m.name, m.num_bytes, m.group_size) for m in calls.messages] == [
        ("all_to_all", 1024, 4),
        ("send_recv", 0, 4),
    ]
    assert calls.busy_ns.tolist() == [30_000, 10_000]


def test_a_size_that_is_not_known_gives_no_bandwidth(tmp_path):
    events = [step(1, 0, 100), *launched(REDUCE, 5, 20, 50, 1)]
    (stats,) = collective_stats(calls_of(trace_of(tmp_path, events, **WORLD)))
    assert (stats.name, stats.message_bytes, stats.bus_bytes_per_s) == ("all_reduce", 0, None)
    assert bus_bandwidth(Message(name="all_reduce", group="", group_size=4, num_bytes=8, dtype=""), 0) is None


def test_on_a_cpu_the_carrying_thread_says_how_long(tmp_path):
    """40 us of gloo, of which the main thread computes 15."""
    gloo = {"Input Dims": [[67848]], "Input type": ["float"]}
    events = [
        step(1, 0, 100),
        operator("aten::addmm", 10, 35),
        event("user_annotation", "gloo:all_reduce", 20, 60, OTHER, **gloo),
    ]
    world = {"distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 2}}
    (stats,) = collective_stats(calls_of(trace_of(tmp_path, events, **world)))
    assert (stats.name, stats.message_bytes, stats.group_size) == ("all_reduce", 4 * 67848, 2)
    assert (stats.total_ns, stats.exposed_ns) == (40_000, 25_000)


def test_collectives_know_the_step_that_launched_them(tmp_path):
    events = [step(7, 0, 50), *all_reduce(5, 20, 30, 1), step(8, 50, 100), *all_reduce(48, 60, 70, 2)]
    events += [*all_reduce(80, 82, 86, 3), *all_reduce(90, 92, 99, 4)]
    assert calls_of(trace_of(tmp_path, events, **WORLD)).step.tolist() == [7, 7, 8, 8]


# --- ranks ------------------------------------------------------------------------------------------


def made(
    times: list[tuple[int, int]],
    *,
    name: str = "all_reduce",
    group: str = "0",
    step: int = 1,
    seq: int = -1,
    size: int = 4,
) -> CollectiveCalls:
    """Calls in milliseconds; sequence numbers count from `seq` where that is not -1."""
    message = Message(name=name, group=group, group_size=size, num_bytes=4 * 10**6, dtype="Float")
    start, end = (np.array([time[side] * MS for time in times], dtype=np.int64) for side in (0, 1))
    messages = tuple(
        Message(
            name=name, group=group, group_size=size, num_bytes=message.num_bytes, dtype="Float",
            sequence=seq + n if seq >= 0 else -1,
        )
        for n in range(len(times))
    )  # fmt: skip
    return CollectiveCalls(
        messages=messages,
        start=start,
        end=end,
        step=np.full(len(times), step),
        busy_ns=end - start,
        exposed_ns=(end - start) // 2,
        exposed_start=start,
        exposed_end=end,
    )


def joined(*parts: CollectiveCalls) -> CollectiveCalls:
    names = ("start", "end", "step", "busy_ns", "exposed_ns")
    joint = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    exposed = union(joint["start"], joint["end"])
    messages = sum((part.messages for part in parts), ())
    return CollectiveCalls(messages=messages, **joint, exposed_start=exposed[0], exposed_end=exposed[1])


def test_who_waits_and_what_the_network_takes():
    """Rank 1 arrives 3, 4 and 5 ms late, with a clock that is 100 ms ahead; the network takes 2 ms."""
    fast = made([(10, 15), (30, 36), (50, 57)])
    slow = made([(113, 115), (134, 136), (155, 157)])
    found = compare_ranks({0: fast, 1: slow})
    assert found.offsets_ns == {0: 0, 1: -100 * MS}
    (stats,) = found.collectives
    assert (stats.count, stats.latency_ns, stats.skew_ns) == (3, 2 * MS, 4 * MS)
    assert (stats.total_ns, stats.exposed_ns) == ((18 + 6) * MS // 2, (18 + 6) * MS // 4)
    # 4 MB * 2 * 3/4 in 2 ms
    assert stats.bus_bytes_per_s == pytest.approx(3e9)
    assert [(wait.rank, wait.wait_ns, wait.late_share) for wait in found.waits] == [(0, 12 * MS, 0.0), (1, 0, 1.0)]
    assert straggler(found.waits) == 1
    assert found.notes == ()


def test_of_a_wait_counts_as_exposed_what_no_compute_hides_and_waits_at_once_count_once():
    """Rank 0 waits from 10 to 13 and from 11 to 14 ms; compute hides all before 12 ms."""
    first = joined(made([(10, 15)]), made([(11, 16)], group="1"))
    calls = {0: first, 1: joined(made([(13, 15)]), made([(14, 16)], group="1"))}
    calls[0] = replace(first, exposed_start=np.array([12 * MS]), exposed_end=np.array([16 * MS]))
    first, second = compare_ranks(calls).waits
    assert (first.wait_ns, first.exposed_ns) == (6 * MS, 2 * MS)
    assert (second.wait_ns, second.exposed_ns) == (0, 0)


def test_steps_that_another_rank_did_not_record_are_not_compared():
    """Two of the three steps of rank 0 have a counterpart: its wait is theirs."""
    three = joined(*(made([(10 * n, 10 * n + 5)], step=n) for n in (1, 2, 3)))
    two = joined(*(made([(10 * n + 3, 10 * n + 5)], step=n) for n in (1, 2)))
    waits = compare_ranks({0: three, 1: two}).waits
    assert [(wait.wait_ns, wait.step_share) for wait in waits] == [(6 * MS, pytest.approx(2 / 3)), (0, 1.0)]


def test_the_late_part_is_of_the_steps_that_were_compared():
    """10 of 40 ns of communication are waiting; where only half of the steps were compared, 10 of 20 are."""
    breakdown = make_breakdown([{"communication": 20}] * 2)
    wait = RankWait(rank=0, wait_ns=30, late_share=0.0, exposed_ns=10)
    assert late_part(wait, breakdown) == 0.25
    assert late_part(msgspec.structs.replace(wait, step_share=0.5), breakdown) == 0.5
    assert late_part(None, breakdown) == late_part(wait, make_breakdown([{"host": 20}])) == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_truth_is_found_for_any_arrivals_and_clocks(seed):
    """Collectives end together 2 ms after the last arrival; clocks are off by anything."""
    generator = random.Random(seed)
    ranks = list(range(generator.randint(2, 5)))
    clock = {rank: generator.randint(-(10**6), 10**6) for rank in ranks}
    arrivals = [{rank: 100 * n + generator.randint(0, 50) for rank in ranks} for n in range(9)]
    calls = {
        rank: made([(a[rank] + clock[rank], max(a.values()) + 2 + clock[rank]) for a in arrivals], size=len(ranks))
        for rank in ranks
    }
    found = compare_ranks(calls)
    assert found.offsets_ns == {rank: (clock[0] - clock[rank]) * MS for rank in ranks}
    (stats,) = found.collectives
    assert stats.latency_ns == 2 * MS
    assert stats.skew_ns == MS * sorted(max(a.values()) - min(a.values()) for a in arrivals)[4]
    waits = {wait.rank: wait.wait_ns for wait in found.waits}
    assert waits == {rank: MS * sum(max(a.values()) - a[rank] for a in arrivals) for rank in ranks}
    assert sum(wait.late_share for wait in found.waits) == pytest.approx(1)


def test_sequence_numbers_match_although_a_rank_lacks_the_first_calls():
    whole = made([(10, 12), (30, 32), (50, 52)], seq=40)
    rest = made([(30, 32), (50, 52)], seq=41)
    found = compare_ranks({0: whole, 1: rest})
    assert found.offsets_ns == {0: 0, 1: 0}
    assert found.notes == ("1 collective call not compared: missing on some ranks of the group",)


def test_without_sequence_numbers_a_step_with_a_call_too_many_is_left_out():
    first = joined(made([(10, 12), (30, 32)], step=3), made([(50, 52)], step=4))
    second = joined(made([(30, 32)], step=3), made([(50, 52)], step=4))
    found = compare_ranks({0: first, 1: second})
    assert found.collectives[0].latency_ns == 2 * MS
    assert found.offsets_ns == {0: 0, 1: 0}
    assert found.notes == ("2 collective calls not compared: missing on some ranks of the group",)


def test_each_group_is_compared_among_its_own_ranks_and_clocks_follow_from_group_to_group():
    """Ranks 0 and 1 share a group, ranks 1 and 2 another one; every clock is 1 s behind the one before."""
    first = made([(10, 12), (20, 22)], group="a", size=2)
    calls = {
        0: first,
        1: joined(
            made([(-990, -988), (-980, -978)], group="a", size=2), made([(-970, -960), (-950, -941)], group="b", size=2)
        ),
        2: made([(-1965, -1960), (-1945, -1941)], group="b", size=2),
    }
    found = compare_ranks(calls)
    assert found.offsets_ns == {0: 0, 1: 1000 * MS, 2: 2000 * MS}
    assert {(s.group, s.latency_ns, s.skew_ns) for s in found.collectives} == {
        ("a", 2 * MS, 0),
        ("b", 9 * MS // 2, 5 * MS),
    }
    assert {wait.rank: wait.wait_ns for wait in found.waits} == {0: 0, 1: 10 * MS, 2: 0}


def test_a_name_that_several_groups_share_is_not_compared():
    calls = {rank: made([(10, 12)], group="tensor parallel", size=2) for rank in range(4)}
    found = compare_ranks(calls)
    assert found.waits == ()
    assert "process group 'tensor parallel' was not compared: its size is 2, but 4 ranks report it" in found.notes


def test_calls_at_different_times_are_not_one_collective():
    """The median aligns the clocks by the others; the second pair is 300 ms apart."""
    first = made([(10, 12), (30, 32), (50, 52)])
    second = made([(10, 12), (330, 332), (50, 52)])
    found = compare_ranks({0: first, 1: second})
    assert found.notes == ("1 collective call not compared: not in progress on all ranks at once",)
    assert found.collectives[0].skew_ns == 0
    assert [wait.late_share for wait in found.waits] == [1.0, 0.0]  # of equal arrivals the first rank's is named


def test_sends_match_nothing_and_a_broadcast_makes_nobody_wait():
    calls = {
        rank: joined(made([(10, 12 + rank)], name="broadcast"), made([(20, 30)], name="send")) for rank in range(2)
    }
    found = compare_ranks(calls)
    assert found.waits == ()
    assert {stats.name: stats.latency_ns for stats in found.collectives} == {"broadcast": 2 * MS, "send": None}
    assert len(found.notes) == 1
    assert "the clocks of rank 0 and rank 1 were not aligned" in found.notes[0]


def test_ranks_without_collectives_have_nothing_to_compare():
    found = compare_ranks({0: made([]), 1: made([])})
    assert (found.collectives, found.waits, found.offsets_ns) == ((), (), {0: 0, 1: 0})


def test_of_ranks_that_wait_alike_the_one_that_is_late_more_often_is_waited_for():
    found = compare_ranks({0: made([(10, 12), (20, 22)]), 1: made([(10, 12), (20, 22)])})
    assert straggler(found.waits) == 0
    assert straggler(()) is None


# --- real traces ------------------------------------------------------------------------------------


@needs_traces
@pytest.mark.parametrize(
    "name",
    [
        "h200_vit_b_ddp2_split0_rank0",
        "h200_vit_b_ddp2_split0_rank1",
        "hta_ddp_a100_rank0of2_nccl_args",
        "hta_job128_rank0",
    ],
)
def test_real_exposed_time_is_that_of_the_breakdown(name):
    """On one communication stream no two collectives overlap, and what hides them is compute alone."""
    trace = read_trace(trace_file(name))
    capture = link(trace)
    device = capture.device_numbers[0]
    segments, _ = device_time(capture, device)
    stats = collective_stats(collective_calls(capture, segments, device))
    communicating = np.isin(segments.category, communication_codes())
    assert sum(s.exposed_ns for s in stats) == int((segments.end - segments.start)[communicating].sum())


def communication_codes() -> list[int]:
    return [PRIORITY[Category.COMMUNICATION], PRIORITY[Category.PIPELINE_BUBBLE]]


@needs_traces
def test_two_real_ranks_agree_within_microseconds():
    traces = [read_trace(trace_file(f"h200_vit_b_ddp2_split0_rank{rank}")) for rank in range(2)]
    shifted = {}
    for rank, trace in enumerate(traces):
        calls = calls_of(trace)
        wall = trace.origin_ns + trace.base_time_ns
        shifted[rank] = calls.shifted(wall)
    found = compare_ranks(shifted)
    # Two GPUs of one machine: 14 buckets in each of 3 steps, and clocks that differ by less than 0.1 ms.
    assert sum(stats.count for stats in found.collectives) == 42
    assert abs(found.offsets_ns[1]) < 100_000
    assert found.notes == ()
    # Gradients of 86.6 million parameters in float32, 3 times.
    assert sum(s.count * s.message_bytes for s in found.collectives) == pytest.approx(3 * 4 * 86.6e6, rel=0.01)
    largest = found.collectives[0]
    assert largest.latency_ns is not None
    assert largest.bus_bytes_per_s is not None
    # NVLink of an H200: 450 GB/s in each direction.
    assert 50e9 < largest.bus_bytes_per_s < 450e9
