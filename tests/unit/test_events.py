"""From Kineto's events to columns."""

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import Event, event, kernel, note, operator, runtime, step, trace_of

from steptune.tuner.profiling import reader
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import Kind, Trace, TraceError


def timed(ts: Any, dur: Any = 1, **more: Any) -> Event:
    return {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": ts, "dur": dur, **more}


def text_of(microseconds: str) -> Any:
    """A number that is written into the file digit by digit."""
    return f"<{microseconds}>"


def trace_of_text(directory: Path, events: list[Event]) -> Trace:
    path = directory / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}).replace('"<', "").replace('>"', ""))
    return read_trace(path)


class TestTimes:
    @given(ns=st.lists(st.integers(0, 2**61), min_size=1, max_size=5))
    def test_microseconds_with_three_decimals_are_exact_nanoseconds(
        self, tmp_path_factory: pytest.TempPathFactory, ns: list[int]
    ) -> None:
        """Relative to the base time as torch writes them now, or since 1970, where a float has no nanoseconds left."""
        events = [timed(text_of(f"{time // 1000}.{time % 1000:03}")) for time in ns]
        trace = trace_of_text(tmp_path_factory.getbasetemp(), events)
        assert (trace.host.start + trace.origin_ns).tolist() == sorted(ns)

    @given(first=st.integers(0, 10**9), later=st.integers(2**54, 2**60), size=st.integers(20, 100))
    def test_pieces_with_small_and_with_large_times_are_exact_alike(
        self, tmp_path_factory: pytest.TempPathFactory, first: int, later: int, size: int
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "trace.json"
        rows = [
            f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "a", "ts": {t // 1000}.{t % 1000:03}, "dur": 1.001\n  }}'
            for t in (first, first + 1, later, later + 1)
        ]
        path.write_text('{\n  "traceEvents": [\n' + ",\n".join(rows) + "\n  ]\n}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "BLOCK_BYTES", size)
            trace = read_trace(path)
        assert trace.framing == "chunked"
        assert (trace.host.start + trace.origin_ns).tolist() == [first, first + 1, later, later + 1]
        assert (trace.host.end - trace.host.start).tolist() == [1001] * 4
        assert trace.num_events == 4

    @pytest.mark.parametrize(
        ("value", "ns"), [(7, 7000), ("12.5", 12500), (0.001, 1), ("3", 3000), (1623142623460111, 1623142623460111000)]
    )
    def test_integers_and_strings(self, tmp_path: Path, value: float | str, ns: int) -> None:
        assert trace_of(tmp_path, [timed(value)]).origin_ns == ns

    def test_times_are_relative_to_the_first_event(self, tmp_path: Path) -> None:
        trace = trace_of(
            tmp_path, [operator("b", 5_000_000_007, 5_000_000_009), kernel("a", 5_000_000_002, 5_000_000_003)]
        )
        assert trace.origin_ns == 5_000_000_002_000
        assert (trace.work.start.tolist(), trace.work.end.tolist()) == ([0], [1000])
        assert (trace.host.start.tolist(), trace.host.end.tolist()) == ([5000], [7000])
        assert trace.span == (0, 7000)

    def test_a_negative_duration_makes_an_instant(self, tmp_path: Path) -> None:
        trace = trace_of(tmp_path, [operator("a", 5, 3), operator("b", 6, 7)])
        assert trace.host.end.tolist() == [0, 2000]
        assert trace.losses == ("1 event with a negative duration, treated as instants",)

    @pytest.mark.parametrize("dur", [None, "long", math.nan])
    def test_no_duration_makes_an_instant(self, tmp_path: Path, dur: Any) -> None:
        row = timed(5, dur)
        assert trace_of(tmp_path, [row]).host.end.tolist() == [0]
        del row["dur"]
        assert trace_of(tmp_path, [row]).host.end.tolist() == [0]

    @pytest.mark.parametrize("ts", [None, "soon", math.nan, math.inf, 1e300, -1e300, 10**40, {}, [1]])
    def test_events_without_a_time_are_left_out_and_counted(self, tmp_path: Path, ts: Any) -> None:
        without = timed(0)
        del without["ts"]
        trace = trace_of(tmp_path, [operator("a", 1, 2), timed(ts), without, kernel("k", 1, 2)])
        assert (len(trace.host), len(trace.work), trace.num_events, trace.num_lost) == (1, 1, 4, 0)
        assert "2 events without a time, left out" in trace.losses, "said once: they were read"

    def test_without_any_time_there_is_no_trace(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="holds no timed event"):
            trace_of(tmp_path, [timed(None)])


class TestKinds:
    HOST: ClassVar = {
        "cpu_op": Kind.OPERATOR,
        "Operator": Kind.OPERATOR,
        "user_annotation": Kind.ANNOTATION,
        "cuda_runtime": Kind.RUNTIME,
        "cuda_driver": Kind.RUNTIME,
        "hip_runtime": Kind.RUNTIME,
        "Runtime": Kind.RUNTIME,
        "xpu_runtime": Kind.RUNTIME,
        "overhead": Kind.OVERHEAD,
        "python_function": Kind.PYTHON,
    }
    WORK: ClassVar = {
        "kernel": Kind.KERNEL,
        "Kernel": Kind.KERNEL,
        "gpu_memcpy": Kind.COPY,
        "Memcpy": Kind.COPY,
        "gpu_memset": Kind.COPY,
        "Memset": Kind.COPY,
        "cuda_sync": Kind.SYNC,
    }

    def test_of_old_and_new_names(self, tmp_path: Path) -> None:
        names = [*self.HOST, *self.WORK]
        trace = trace_of(tmp_path, [event(name, name, i, i + 1) for i, name in enumerate(names)])
        assert [Kind(kind) for kind in trace.host.kind.tolist()] == list(self.HOST.values())
        assert [Kind(kind) for kind in trace.work.kind.tolist()] == list(self.WORK.values())

    def test_what_is_no_timed_event_is_left_out_but_counted(self, tmp_path: Path) -> None:
        """Flow arrows, counters, metadata, device annotations, and categories that nobody has heard of."""
        events = [
            operator("aten::mm", 0, 1),
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
            {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 3, "cat": "ac2g", "name": "ac2g"},
            {"ph": "i", "name": "Iteration Start", "ts": 1, "pid": 1, "tid": 1},
            {"ph": "C", "name": "GPU 0 Utilization", "pid": 1, "ts": 1, "args": {"GPU Utilization": 0.0}},
            {"ph": "B", "cat": "cpu_op", "name": "begin", "pid": 1, "tid": 1, "ts": 1},
            event("gpu_user_annotation", "ProfilerStep#1", 0, 9),
            event("quantum_op", "new", 0, 9),
        ]
        trace = trace_of(tmp_path, events)
        assert (len(trace), trace.num_events, trace.losses) == (1, 8, ())

    def test_fields_that_nobody_knows_are_ignored(self, tmp_path: Path) -> None:
        row = {**operator("a", 0, 1), "bp": "e", "cname": {"deep": [1]}, "args": {"new": [{}], "External id": 4}}
        assert trace_of(tmp_path, [row]).host.external.tolist() == [4]


class TestColumns:
    def test_sorted_by_start_and_outer_events_first(self, tmp_path: Path) -> None:
        trace = trace_of(tmp_path, [operator("inner", 1, 2), operator("later", 3, 4), operator("outer", 1, 9)])
        assert [trace.names[name] for name in trace.host.name] == ["outer", "inner", "later"]

    @given(spans=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
    def test_order_of_ties_is_that_of_the_file(
        self, tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]]
    ) -> None:
        events = [operator(str(number), start, start + length) for number, (start, length) in enumerate(spans)]
        trace = trace_of(tmp_path_factory.getbasetemp(), events)
        expected = sorted(range(len(spans)), key=lambda i: (spans[i][0], -spans[i][1], i))
        assert [int(trace.names[name]) for name in trace.host.name] == expected

    def test_device_stream_and_links(self, tmp_path: Path) -> None:
        events = [
            event("kernel", "k", 0, 1, 7, correlation=12, device=3, stream=9, **{"External id": 5, "graph node id": 8}),
            runtime("r", 2, 3, 12),
            operator("o", 4, 5),
            {"ph": "X", "cat": "kernel", "name": "no args", "ts": 6, "dur": 1, "pid": 0, "tid": 7},
        ]
        trace = trace_of(tmp_path, events)
        work, host = trace.work, trace.host
        assert work.device.tolist() == [3, 0]
        assert work.stream.tolist() == [9, 7]
        assert (work.correlation.tolist(), work.external.tolist()) == ([12, -1], [5, -1])
        assert work.graph_node.tolist() == [8, -1]
        assert host.correlation.tolist() == [12, -1]

    def test_what_a_kernel_and_a_copy_record_of_themselves(self, tmp_path: Path) -> None:
        recorded = {"est. achieved occupancy %": 38, "blocks per SM": 5.5}
        events = [
            event("kernel", "k", 0, 1, **recorded),
            event("kernel", "idle", 1, 2, **{"est. achieved occupancy %": 0}),
            event("gpu_memcpy", "c", 2, 3, bytes=2**40),
        ]
        work = trace_of(tmp_path, events).work
        assert work.occupancy[:2].tolist() == [pytest.approx(0.38), 0]
        assert work.blocks_per_sm[0] == 5.5
        assert np.isnan(work.occupancy[2])
        assert np.isnan(work.blocks_per_sm[1:]).all()
        assert work.num_bytes.tolist() == [-1, -1, 2**40]

    def test_old_traces_spell_links_and_streams_differently(self, tmp_path: Path) -> None:
        """Spelling of 2021: "external id", threads as strings, the stream in the thread's name."""
        events = [
            {**event("Operator", "aten::mm", 0, 1, **{"External id": 2}), "tid": "25738"},
            {**event("Runtime", "cudaLaunchKernel", 0, 1, correlation=9, **{"external id": 2}), "tid": "25738"},
            {**event("Kernel", "sgemm", 2, 3, correlation=9, **{"external id": 2}), "pid": 0, "tid": "stream 7"},
        ]
        trace = trace_of(tmp_path, events)
        assert trace.host.external.tolist() == [2, 2]
        assert (trace.work.external.tolist(), trace.work.stream.tolist()) == ([2], [7])
        assert trace.threads == (("100", "25738"),)

    def test_rocm(self, tmp_path: Path) -> None:
        """Stream 0 is a stream, and copies are named after their direction."""
        events = [
            event("cuda_runtime", "hipLaunchKernel", 0, 1, correlation=1),
            event("kernel", "Cijk_Ailk_Bljk", 1, 2, correlation=1, device=2, stream=0),
            event("gpu_memcpy", "CopyHostToDevice", 2, 3, correlation=2, device=2, stream=0),
        ]
        trace = trace_of(tmp_path, events)
        assert trace.work.kind.tolist() == [Kind.KERNEL, Kind.COPY]
        assert trace.work.stream.tolist() == [0, 0]

    @pytest.mark.parametrize("value", ["12", 12.0, "12.0"])
    def test_a_correlation_of_another_type(self, tmp_path: Path, value: str | float) -> None:
        trace = trace_of(tmp_path, [event("kernel", "k", 0, 1, correlation=value), operator("a", 0, 1, 4)])
        assert trace.work.correlation.tolist() == [12]
        assert trace.threads == (("100", "4"),)

    @pytest.mark.parametrize("value", [None, "many", [1], {}, 2**64 - 1, 2**80, math.nan])
    def test_a_number_that_is_none_is_not_recorded(self, tmp_path: Path, value: Any) -> None:
        args = dict.fromkeys(("correlation", "External id", "bytes", "stream", "device", "graph node id"), value)
        trace = trace_of(tmp_path, [event("kernel", "k", 0, 1, 7, **args)])
        work = trace.work
        assert [int(column[0]) for column in (work.correlation, work.external, work.num_bytes, work.graph_node)] == [
            -1
        ] * 4
        assert (work.device.tolist(), work.stream.tolist()) == ([0], [7])

    def test_threads_are_pairs_of_process_and_thread(self, tmp_path: Path) -> None:
        other = {**operator("c", 4, 5), "pid": "Spans"}
        trace = trace_of(tmp_path, [operator("a", 0, 1, 1), operator("b", 2, 3, 2), other, operator("d", 6, 7, 1)])
        a, b, c, d = trace.host.thread.tolist()
        assert a == d
        assert len({a, b, c}) == 3
        assert trace.threads[c] == ("Spans", "1")

    def test_a_thread_stays_one_where_other_fields_are_odd(self, tmp_path: Path) -> None:
        """Such pieces are decoded another way."""
        plain = trace_of(tmp_path, [operator("a", 0, 1), operator("b", 2, 3)])
        odd = trace_of(tmp_path, [operator("a", 0, 1), {**operator("b", 2, 3), "dur": "1"}])
        assert odd.threads == plain.threads == (("100", "1"),)

    def test_names_that_are_missing_are_empty(self, tmp_path: Path) -> None:
        assert trace_of(tmp_path, [{**operator("a", 0, 1), "name": None}]).names == ("",)

    def test_shapes_stacks_and_autograd(self, tmp_path: Path) -> None:
        recorded = {
            "Input Dims": [[2, 3], []],
            "Input type": ["float", "Scalar"],
            "Call stack": "a.py(1): f;b.py(2): g",
        }
        events = [
            event("cpu_op", "aten::mm", 0, 1, **recorded, **{"Sequence number": 5, "Fwd thread id": 0}),
            event("cpu_op", "MmBackward0", 2, 3, **{"Sequence number": 5, "Fwd thread id": 1}),
            event("cpu_op", "aten::mm", 4, 5, **recorded),
        ]
        trace = trace_of(tmp_path, events)
        host = trace.host
        assert host.shape[0] == host.shape[2]
        assert trace.shapes[host.shape[0]] == b'[[2, 3], []]|["float", "Scalar"]'
        assert (host.shape[1], host.stack[1]) == (-1, -1)
        assert trace.stacks[host.stack[0]] == "a.py(1): f;b.py(2): g"
        assert host.sequence.tolist() == [5, 5, -1]
        assert host.forward_thread.tolist() == [0, 1, -1]

    def test_python_frames_are_host_events(self, tmp_path: Path) -> None:
        trace = trace_of(tmp_path, [event("python_function", "nn.Module: Linear_0", 0, 9, **{"Python id": 3})])
        assert trace.host.kind.tolist() == [Kind.PYTHON]

    def test_matching_by_name_and_kind(self, tmp_path: Path) -> None:
        trace = trace_of(tmp_path, [step(1, 0, 9), operator("ProfilerStep#2", 1, 2), note("forward", 3, 4)])
        assert trace.host_rows(r"^ProfilerStep#\d+$", Kind.ANNOTATION).tolist() == [0]
        assert trace.host_rows(r"^ProfilerStep#\d+$", Kind.ANNOTATION, Kind.OPERATOR).tolist() == [0, 1]

    def test_waits_are_no_work(self, tmp_path: Path) -> None:
        events = [kernel("k", 0, 1, device=1), event("cuda_sync", "Stream Sync", 1, 2, device=0), kernel("l", 2, 3)]
        trace = trace_of(tmp_path, events)
        assert trace.work_rows().tolist() == [0, 2]
        assert trace.work_rows(0).tolist() == [2]


class TestRecords:
    def test_memory_is_what_the_allocator_said_last(self, tmp_path: Path) -> None:
        def point(ts: float | None, total: int, **args: int) -> Event:
            return {
                "ph": "i",
                "cat": "cpu_instant_event",
                "name": "[memory]",
                "ts": ts,
                "pid": 1,
                "tid": 1,
                "args": {"Total Allocated": total, "Total Reserved": 2 * total, "Device Id": -1, **args},
            }

        events = [
            operator("a", 10, 20),
            point(15, 4096, **{"Device Type": 1, "Device Id": 1}),
            point(12, 1024, **{"Device Type": 0}),
            point(None, 1, **{"Device Type": 0}),
        ]
        trace = trace_of(tmp_path, events)
        assert [(p.time, p.device, p.allocated_bytes, p.reserved_bytes) for p in trace.memory] == [
            (2000, "cpu", 1024, 2048),
            (5000, "cuda:1", 4096, 8192),
        ]
        assert trace.losses == ("1 event without a time, left out",)

    def test_collectives_on_the_host_and_on_kernels(self, tmp_path: Path) -> None:
        described = {
            "Collective name": "allreduce",
            "In msg nelems": 100,
            "Out msg nelems": 25,
            "Group size": 2,
            "dtype": "Float",
            "Process Group Name": "0",
            "Seq": 7,
        }
        events = [
            event("cpu_op", "record_param_comms", 0, 1, **described, **{"External id": 44}),
            event("kernel", "ncclDevKernel_AllReduce", 2, 5, **described, correlation=9, **{"External id": 44}),
            operator("aten::mm", 6, 7),
        ]
        host, kernel_record = trace_of(tmp_path, events).collectives
        assert (host.external, host.correlation, kernel_record.correlation) == (44, -1, 9)
        for record in (host, kernel_record):
            assert (record.name, record.message_elements, record.group_size) == ("allreduce", 100, 2)
            assert (record.dtype, record.group_name, record.sequence) == ("Float", "0", 7)

    def test_rank_of_a_distributed_trace(self, tmp_path: Path) -> None:
        info = {"backend": "nccl", "rank": 3, "world_size": 8}
        trace = trace_of(tmp_path, [operator("a", 0, 1)], distributedInfo=info)
        assert (trace.rank, trace.num_ranks) == (3, 8)
