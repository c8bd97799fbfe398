"""Reading Kineto's JSON."""

import gzip
import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_events import event, kernel, note, operator, runtime, step, trace_of, write_trace
from traces import needs_traces, trace_file

from tuner.profiling.trace import Kind, TraceError, _nanoseconds, read_trace


class TestTimes:
    @given(ns=st.integers(0, 10**15))
    def test_microseconds_with_three_decimals_are_exact_nanoseconds(self, ns: int) -> None:
        """As a float is read from the file; up to eleven days after the trace's base time."""
        assert _nanoseconds(float(f"{ns // 1000}.{ns % 1000:03}")) == ns

    @pytest.mark.parametrize(("value", "ns"), [(7, 7000), ("12.5", 12500), (0.001, 1), ("3", 3000), (float("nan"), 0)])
    def test_integers_strings_and_nan(self, value: float | str, ns: int) -> None:
        assert _nanoseconds(value) == ns

    def test_times_are_relative_to_the_first_event(self, tmp_path: Path) -> None:
        trace = trace_of(
            tmp_path, [operator("b", 5_000_000_007, 5_000_000_009), operator("a", 5_000_000_002, 5_000_000_003)]
        )
        assert trace.start.tolist() == [0, 5000]
        assert trace.end.tolist() == [1000, 7000]

    def test_a_negative_duration_is_no_duration(self, tmp_path: Path) -> None:
        trace = trace_of(tmp_path, [operator("a", 5, 3)])
        assert (trace.end == trace.start).all()


class TestColumns:
    def test_sorted_by_start_and_outer_events_first(self, tmp_path: Path) -> None:
        trace = trace_of(tmp_path, [operator("inner", 1, 2), operator("later", 3, 4), operator("outer", 1, 9)])
        assert [trace.name_of(i) for i in range(len(trace))] == ["outer", "inner", "later"]

    def test_kinds_of_old_and_new_names(self, tmp_path: Path) -> None:
        categories = {
            "cpu_op": Kind.OPERATOR,
            "Operator": Kind.OPERATOR,
            "user_annotation": Kind.ANNOTATION,
            "cuda_runtime": Kind.RUNTIME,
            "cuda_driver": Kind.RUNTIME,
            "Runtime": Kind.RUNTIME,
            "kernel": Kind.KERNEL,
            "Kernel": Kind.KERNEL,
            "gpu_memcpy": Kind.COPY,
            "Memset": Kind.COPY,
            "cuda_sync": Kind.SYNC,
            "overhead": Kind.OVERHEAD,
        }
        trace = trace_of(tmp_path, [event(name, name, i, i + 1) for i, name in enumerate(categories)])
        assert [Kind(kind) for kind in trace.kind.tolist()] == list(categories.values())

    def test_what_is_no_timed_event_is_left_out(self, tmp_path: Path) -> None:
        """Flow arrows, counters, metadata, device annotations and Python frames."""
        events = [
            operator("aten::mm", 0, 1),
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
            {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 3, "cat": "ac2g", "name": "ac2g"},
            {"ph": "i", "name": "Iteration Start", "ts": 1, "pid": 1, "tid": 1},
            {"ph": "C", "name": "GPU 0 Utilization", "pid": 1, "ts": 1, "args": {"GPU Utilization": 0.0}},
            event("gpu_user_annotation", "ProfilerStep#1", 0, 9),
            event("python_function", "nn.Module: Linear_0", 0, 9),
        ]
        assert len(trace_of(tmp_path, events)) == 1

    def test_device_and_correlation(self, tmp_path: Path) -> None:
        trace = trace_of(
            tmp_path,
            [
                kernel("k", 0, 1, correlation=12, device=3),
                runtime("r", 2, 3, 12),
                operator("o", 4, 5),
                {"ph": "X", "cat": "kernel", "name": "no args", "ts": 6, "dur": 1, "pid": 0, "tid": 7},
            ],
        )
        assert trace.device.tolist() == [3, -1, -1, 0]
        assert trace.correlation.tolist() == [12, 12, -1, -1]

    def test_threads_are_pairs_of_process_and_thread(self, tmp_path: Path) -> None:
        other = {**operator("c", 4, 5), "pid": 200}
        trace = trace_of(tmp_path, [operator("a", 0, 1, 1), operator("b", 2, 3, 2), other, operator("d", 6, 7, 1)])
        a, b, c, d = trace.thread.tolist()
        assert a == d
        assert len({a, b, c}) == 3

    def test_rank_of_a_distributed_trace(self, tmp_path: Path) -> None:
        info = {"backend": "nccl", "rank": 3, "world_size": 8}
        trace = trace_of(tmp_path, [operator("a", 0, 1)], distributedInfo=info)
        assert (trace.rank, trace.num_ranks) == (3, 8)

    def test_matching_by_name_and_kind(self, tmp_path: Path) -> None:
        trace = trace_of(tmp_path, [step(1, 0, 9), operator("ProfilerStep#2", 1, 2), note("forward", 3, 4)])
        assert trace.matching(r"^ProfilerStep#\d+$", Kind.ANNOTATION).tolist() == [0]
        assert trace.matching(r"^ProfilerStep#\d+$", Kind.ANNOTATION, Kind.OPERATOR).tolist() == [0, 1]


class TestFiles:
    def test_compressed_and_plain_files_read_alike(self, tmp_path: Path) -> None:
        plain = write_trace(tmp_path / "t.json", [step(1, 0, 2), operator("aten::mm", 0.5, 1.25)])
        packed = tmp_path / "t.json.gz"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        assert read_trace(packed).end.tolist() == read_trace(plain).end.tolist() == [2000, 1250]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "not a torch.profiler trace"),
            (b"{", "not a torch.profiler trace"),
            (b'{"traceEvents": 3}', "not a torch.profiler trace"),
            (b"{}", "holds no timed event"),
            (b'{"traceEvents": [{"ph": "M"}]}', "holds no timed event"),
            (gzip.compress(b'{"traceEvents": []}')[:-9], "cannot be read"),
        ],
        ids=["empty", "not JSON", "wrong type", "no events", "no timed event", "cut"],
    )
    def test_what_is_no_trace_is_refused_by_name(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "broken.json"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=rf"broken\.json.*{message}"):
            read_trace(path)

    def test_a_missing_file_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"nothing\.json cannot be read"):
            read_trace(tmp_path / "nothing.json")


@needs_traces
@pytest.mark.parametrize("name", ["hta_ddp_a100_rank0of2_nccl_args", "h200_resnet50_cuda_graph"])
def test_real_traces_are_read_without_losing_a_nanosecond(name: str) -> None:
    """Decimal arithmetic on the file's own digits is the judge of the reader's floats."""
    path = trace_file(name)
    trace = read_trace(path)
    kinds = {"cpu_op", "operator", "kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
    events = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    timed = [e for e in events if e.get("ph") == "X" and str(e.get("cat")).lower() in kinds]
    starts = sorted(int(Decimal(e["ts"]) * 1000) for e in timed)
    lengths = sorted(int(Decimal(e["dur"]) * 1000) for e in timed)
    chosen = trace.indices(Kind.OPERATOR, Kind.KERNEL, Kind.COPY)
    read = (trace.start[chosen] - trace.start[chosen[0]]).tolist()
    assert read == [start - starts[0] for start in starts]
    assert sorted((trace.end - trace.start)[chosen].tolist()) == lengths
