"""Files of every layout, and files that are broken."""

import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_events import Event, copy, kernel, note, operator, runtime, step, write_trace
from traces import NAMES, needs_traces, trace_file

from steptune.tuner.profiling import decoded_size, reader
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import Host, Kind, Trace, TraceError, Work

TOP = {
    "schemaVersion": 1,
    "deviceProperties": [
        {
            "id": 0,
            "name": "Tesla V100",
            "totalGlobalMem": 34084028416,
            "computeMajor": 7,
            "computeMinor": 0,
            "numSms": 80,
        }
    ],
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
    "baseTimeNanoseconds": 1790857026000000000,
}


def kineto_text(events: list[Event], **top: Any) -> bytes:
    """Trace in torch.profiler's form: what describes the capture, the events, and the file's name after them."""
    described = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in top.items())
    rows = []
    for row in events:
        *fields, last = [f"    {json.dumps(key)}: {_value(value)}" for key, value in row.items()]
        rows.append("  {\n" + "".join(f"{field},\n" for field in fields) + last + "\n  }")
    return (
        "{\n" + described + '  "traceEvents": [\n' + ",\n".join(rows) + '\n  ],\n  "traceName": "t.json"\n}\n'
    ).encode()


def _value(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"      {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n    }"


def read(directory: Path, content: bytes) -> Trace:
    path = directory / "trace.json"
    path.write_bytes(content)
    return read_trace(path)


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Events straddle the borders of blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK_BYTES", size)
        yield


def contents(trace: Trace) -> dict[str, Any]:
    """Data of a trace, whatever the order in which names were met and the spaces between numbers."""
    host, work = trace.host, trace.work
    texts: dict[str, Any] = {
        "names": [trace.names[i] for i in (*host.name, *work.name)],
        "threads": [trace.threads[i] for i in host.thread],
        "shapes": [_parsed(trace.shapes[i]) if i >= 0 else None for i in host.shape],
        "stacks": [trace.stacks[i] if i >= 0 else None for i in host.stack],
    }
    for table in (host, work):
        for name, column in vars(table).items():
            if name not in ("name", "thread", "shape", "stack"):
                texts[f"{type(table).__name__}.{name}"] = [None if v != v else v for v in column.tolist()]
    kept = ("collectives", "memory", "devices", "rank", "num_ranks", "distributed", "origin_ns", "base_time_ns")
    return texts | {name: getattr(trace, name) for name in (*kept, "num_events", "num_lost")}


def _parsed(shape: bytes) -> Any:
    dims, _, types = shape.partition(b"|")
    return json.loads(dims), json.loads(types)


def rows(trace: Trace) -> set[tuple[str, int, int]]:
    """Names and times, not relative to the first event."""
    tables: tuple[Host | Work, ...] = (trace.host, trace.work)
    return {
        (trace.names[name], start + trace.origin_ns, end + trace.origin_ns)
        for table in tables
        for name, start, end in zip(table.name.tolist(), table.start.tolist(), table.end.tolist(), strict=True)
    }


times = st.integers(0, 10**9).map(lambda ns: ns / 1000)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "correlation": st.integers(-1, 2**40),
        "External id": st.integers(0, 2**40),
        "Sequence number": st.integers(0, 99),
        "Fwd thread id": st.integers(0, 3),
        "stream": st.integers(0, 20),
        "device": st.integers(0, 7),
        "bytes": st.integers(0, 2**40),
        "Input Dims": st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=3),
        "Input type": st.lists(st.sampled_from(["float", "long int", ""]), max_size=3),
        "Call stack": texts,
        "blocks per SM": st.floats(0, 100, width=32),
        "grid": st.just([1, 1, 1]),
        "nobody knows": st.just({"deeper": [{"a": 1}]}),
    },
).map(lambda args: args | {"Input type": args.get("Input type", [])} if "Input Dims" in args else args)
events_of_any_kind = st.lists(
    st.builds(
        lambda cat, name, ts, dur, pid, tid, args: {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": ts,
            "dur": dur,
            "args": args,
        },
        st.sampled_from(["cpu_op", "cuda_runtime", "kernel", "gpu_memcpy", "user_annotation", "ac2g", "Trace"]),
        texts,
        times,
        times,
        st.one_of(st.integers(0, 9), st.just("Spans")),
        st.one_of(st.integers(0, 9), st.just("stream 7")),
        arguments,
    ),
    min_size=1,
    max_size=8,
).map(lambda found: [operator("aten::mm", 1.5, 2.25), *found])


class TestLayouts:
    @given(events=events_of_any_kind, size=st.integers(16, 400))
    def test_pieces_and_the_whole_file_give_the_same_trace(
        self, tmp_path_factory: pytest.TempPathFactory, events: list[Event], size: int
    ) -> None:
        directory = tmp_path_factory.getbasetemp()
        whole = read(directory, json.dumps({**TOP, "traceEvents": events}).encode())
        chunked = read(directory, kineto_text(events, **TOP))
        with blocks_of(size):
            small = read(directory, kineto_text(events, **TOP))
            whole_in_blocks = read(directory, json.dumps({**TOP, "traceEvents": events}).encode())
        assert whole.framing == "whole file"
        assert chunked.framing == "chunked"
        expected = contents(whole)
        assert contents(chunked) == contents(small) == contents(whole_in_blocks) == expected
        assert whole.losses == chunked.losses == small.losses == ()

    @pytest.mark.parametrize("indent", [None, 0, 1, 2, 3, 4])
    def test_any_indentation_and_any_order_of_fields(self, tmp_path: Path, indent: int | None) -> None:
        """Two spaces before a brace occur in other layouts too, in front of what is no event."""
        events = [operator("a", 0, 1), kernel("k", 1, 2, 5), runtime("r", 0.5, 0.75, 5)]
        for top in ({**TOP, "traceEvents": events}, {"traceEvents": events, **TOP}):
            trace = read(tmp_path, json.dumps(top, indent=indent).encode())
            assert (len(trace), trace.rank, trace.devices[0].num_sms) == (3, 3, 80)
            assert trace.losses == ()

    def test_what_follows_kineto_s_events_may_be_laid_out_like_events(self, tmp_path: Path) -> None:
        events = [operator("a", 0, 1), operator("b", 2, 3)]
        tail = b',\n  "distributedInfo": {\n    "rank": 1,\n    "world_size": 2\n  },\n  "traceName": "t"\n}'
        content = kineto_text(events)
        content = content[: content.index(b',\n  "traceName"')] + tail
        for size in (32, 64, 1 << 20):
            with blocks_of(size):
                trace = read(tmp_path, content)
            assert (len(trace), trace.rank, trace.num_ranks, trace.losses) == (2, 1, 2, ())

    def test_a_bare_list_of_events(self, tmp_path: Path) -> None:
        trace = read(tmp_path, json.dumps([step(1, 0, 2), operator("aten::mm", 0.5, 1.25)]).encode())
        assert trace.host.end.tolist() == [2000, 1250]
        assert trace.losses == ()

    def test_the_head_describes_devices_ranks_and_the_base_of_times(self, tmp_path: Path) -> None:
        trace = read(tmp_path, kineto_text([operator("a", 1, 2)], **TOP))
        (device,) = trace.devices
        assert (device.number, device.name, device.num_sms, device.compute_capability) == (0, "Tesla V100", 80, (7, 0))
        assert device.total_memory_bytes == 34084028416
        assert (trace.rank, trace.num_ranks, trace.distributed["backend"]) == (3, 8, "nccl")
        assert (trace.base_time_ns, trace.origin_ns) == (1790857026000000000, 1000)

    @pytest.mark.parametrize("top", [{}, {"deviceProperties": [None, 3]}, {"distributedInfo": "none"}])
    def test_without_a_description_the_rank_is_unknown(self, tmp_path: Path, top: dict[str, Any]) -> None:
        trace = read(tmp_path, kineto_text([operator("a", 1, 2)], **top))
        assert (trace.rank, trace.num_ranks, trace.devices, trace.base_time_ns) == (None, 1, (), 0)

    def test_a_device_with_odd_values_is_described_as_far_as_it_goes(self, tmp_path: Path) -> None:
        trace = read(tmp_path, kineto_text([operator("a", 1, 2)], deviceProperties=[{"numSms": None, "name": None}]))
        assert (trace.devices[0].num_sms, trace.devices[0].name) == (0, "")


class TestBounds:
    """Hostile files neither take all memory nor end in an error of Python's."""

    @pytest.fixture
    def small_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decoded_size, "SMALL_BYTES", 1 << 10)
        monkeypatch.setattr(decoded_size, "MOST_TEXT_BYTES", 1 << 16)
        monkeypatch.setattr(reader, "MOST_DECODED_BYTES", 1 << 19)

    @pytest.mark.usefixtures("small_bounds")
    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b'{"traceEvents":[' + b"{}," * 20_000 + b"{}]}", "4 MiB of memory, more than the limit of 0 MiB"),
            (b'{"traceEvents":[{"args":{"a":[' + b"[]," * 20_000 + b"[]]}}]}", "of memory, more than"),
            (b'{"traceEvents":[' + b" " * 100_000 + b"]}", "without a line that ends an event"),
            (b'{"traceEvents":[\n  {' + b" " * 100_000 + b"}\n  ]}", "without a line that ends an event"),
            (b" " * 100_000, "without a line that ends an event"),
        ],
    )
    def test_what_would_take_too_much_memory_is_refused(self, tmp_path: Path, content: bytes, says: str) -> None:
        with blocks_of(1 << 12), pytest.raises(TraceError, match=says):
            read(tmp_path, gzip.compress(content))

    @pytest.mark.usefixtures("small_bounds")
    def test_a_file_of_any_size_is_read_in_pieces(self, tmp_path: Path) -> None:
        content = kineto_text([operator("aten::mm", number, number + 0.5) for number in range(2_000)])
        assert len(content) > 1 << 17
        with blocks_of(1 << 12):
            assert len(read(tmp_path, content)) == 2_000

    def test_an_event_of_many_blocks_is_not_copied_once_a_block(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copied: list[int] = []
        join = decoded_size.joined

        def counting(parts: Iterable[bytes]) -> bytes:
            whole = join(parts)
            copied.append(len(whole))
            return whole

        monkeypatch.setattr(reader, "joined", counting)
        content = kineto_text([operator("aten::" + "m" * 100_000, 0, 5), operator("aten::mm", 5, 9)])
        with blocks_of(64):
            trace = read(tmp_path, content)
        assert len(trace.host) == 2
        assert sum(copied) < 8 * len(content)

    @pytest.mark.parametrize("base", [2**63 - 5, 2**63, 2**70, -(2**63)])
    def test_a_base_that_no_clock_shows_is_left_out(self, tmp_path: Path, base: int) -> None:
        trace = read(tmp_path, kineto_text([operator("a", 1, 2)], baseTimeNanoseconds=base))
        assert trace.base_time_ns == 0
        assert trace.losses == (f"baseTimeNanoseconds={base} is not a valid clock time and was ignored",)

    def test_a_base_and_times_that_no_clock_shows_together_lose_the_base(self, tmp_path: Path) -> None:
        late_us = 2**61 // 1000
        trace = read(tmp_path, kineto_text([operator("a", late_us, late_us + 1)], baseTimeNanoseconds=2**61 + 10**6))
        assert (trace.base_time_ns, len(trace.losses)) == (0, 1)

    def test_events_of_different_ages_are_refused(self, tmp_path: Path) -> None:
        events = [operator("a", -4 * 10**15, -4 * 10**15 + 1), operator("b", 4 * 10**15, 4 * 10**15 + 1)]
        with pytest.raises(TraceError, match="span 254 years"):
            read(tmp_path, kineto_text(events))


class TestCompressed:
    CONTENT = kineto_text([operator(f"aten::op{number}", number, number + 0.5) for number in range(200)])

    @pytest.mark.parametrize("size", [32, 1000, 8 << 20])
    def test_reads_like_the_plain_file(self, tmp_path: Path, size: int) -> None:
        plain = contents(read(tmp_path, self.CONTENT))
        with blocks_of(size):
            assert contents(read(tmp_path, gzip.compress(self.CONTENT))) == plain

    @pytest.mark.parametrize("size", [33, 1000, 8 << 20])
    def test_of_several_members_all_are_read(self, tmp_path: Path, size: int) -> None:
        parts = [self.CONTENT[start : start + 3000] for start in range(0, len(self.CONTENT), 3000)]
        with blocks_of(size):
            trace = read(tmp_path, b"".join(map(gzip.compress, parts)))
        assert contents(trace) == contents(read(tmp_path, self.CONTENT))
        assert trace.losses == ()

    def test_a_long_run_of_one_byte_is_read_to_its_end(self, tmp_path: Path) -> None:
        """Little input gives much output: a decompressor may hold some back."""
        content = self.CONTENT.replace(b'"traceEvents"', b" " * 300_000 + b'"traceEvents"')
        with blocks_of(64):
            assert len(read(tmp_path, gzip.compress(content))) == 200

    @pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
    def test_cut_in_the_middle_what_is_whole_is_read(self, tmp_path: Path, share: float) -> None:
        packed = gzip.compress(self.CONTENT)
        trace = read(tmp_path, packed[: int(share * len(packed))])
        assert 0 < len(trace) < 200
        assert rows(trace) < rows(read(tmp_path, self.CONTENT))
        assert trace.losses[0] == "the compressed file is truncated"

    def test_cut_in_the_check_sum_nothing_is_lost_but_it_is_said(self, tmp_path: Path) -> None:
        trace = read(tmp_path, gzip.compress(self.CONTENT)[:-4])
        assert len(trace) == 200
        assert trace.losses == ("the compressed file is truncated",)

    def test_damaged_in_the_middle_what_stands_before_is_read(self, tmp_path: Path) -> None:
        """Reading goes as far as whole blocks do."""
        packed = bytearray(gzip.compress(self.CONTENT))
        packed[len(packed) // 2] ^= 0xFF
        with blocks_of(256):
            trace = read(tmp_path, bytes(packed))
        found = {trace.names[name] for name in trace.host.name}
        assert {f"aten::op{number}" for number in range(50)} <= found
        assert trace.losses[0].startswith("the compressed file is damaged")

    def test_with_nothing_left_it_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="the compressed file is truncated"):
            read(tmp_path, gzip.compress(self.CONTENT)[:12])


EVENTS = [
    operator("first", 1.001, 2.5),
    kernel('second "quoted"', 3, 4.125, 7),
    note("third \\ {}[],", 5, 9),
    copy("fourth", 6, 7),
]
SHORT_TOP = {"deviceProperties": [{"numSms": 80}], "distributedInfo": {"rank": 3}}
LAYOUTS = {
    "kineto": kineto_text(EVENTS, **SHORT_TOP),
    "compact": json.dumps({**SHORT_TOP, "traceEvents": EVENTS, "traceName": "t"}).encode(),
    "list": json.dumps(EVENTS).encode(),
}


class TestTruncated:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("size", [64, 8 << 20])
    def test_at_every_byte_whole_events_are_kept_and_none_is_made_up(
        self, tmp_path: Path, layout: str, size: int
    ) -> None:
        content = LAYOUTS[layout]
        everything = rows(read(tmp_path, content))
        ends = _ends_of_events(content)
        with blocks_of(size):
            for length in range(len(content.rstrip())):
                whole = sum(end <= length for end in ends)
                try:
                    trace = read(tmp_path, content[:length])
                except TraceError:
                    assert whole == 0
                    continue
                assert rows(trace) <= everything
                assert len(trace) == whole
                assert trace.losses
                assert trace.num_lost <= 1

    def test_ranks_and_devices_of_a_truncated_file_are_known(self, tmp_path: Path) -> None:
        trace = read(tmp_path, LAYOUTS["kineto"][:-60])
        assert (trace.rank, trace.devices[0].num_sms) == (3, 80)

    @settings(max_examples=200)
    @given(data=st.data(), layout=st.sampled_from(sorted(LAYOUTS)))
    def test_whatever_is_damaged_the_error_has_a_name(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, layout: str
    ) -> None:
        content = bytearray(LAYOUTS[layout])
        for _ in range(data.draw(st.integers(1, 4))):
            start = data.draw(st.integers(0, len(content) - 1))
            content[start : start + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
        with blocks_of(data.draw(st.sampled_from([40, 8 << 20]))):
            try:
                trace = read(tmp_path_factory.getbasetemp(), bytes(content))
            except TraceError:
                return
        assert len(trace) <= len(EVENTS) + 4

    @given(content=st.binary(max_size=200))
    def test_whatever_the_bytes_the_error_has_a_name(
        self, tmp_path_factory: pytest.TempPathFactory, content: bytes
    ) -> None:
        for start in (b"", b"\x1f\x8b", b'{"traceEvents":[\n  {'):
            with pytest.raises(TraceError):
                read(tmp_path_factory.getbasetemp(), start + content)


def _ends_of_events(content: bytes) -> list[int]:
    """Positions behind the closing braces of the events."""
    text = content.decode()
    start = text.index("[", text.index('"traceEvents"')) if '"traceEvents"' in text else 0
    ends, position = [], start
    for _ in EVENTS:
        _, position = json.JSONDecoder().raw_decode(text, text.index("{", position))
        ends.append(position)
    return ends


def broken(old: str, new: bytes) -> bytes:
    """Kineto's layout with one spot of the second of three events replaced."""
    events = [operator("before", 0, 1), {**operator("spot", 1, 2), "args": {"value": 123}}, operator("after", 2, 3)]
    content = kineto_text([*events, operator("last", 3, 4)], **TOP)
    assert old.encode() in content
    return content.replace(old.encode(), new)


class TestRepairs:
    @pytest.mark.parametrize("token", [b"NaN", b"nan", b"-nan", b"Infinity", b"-Infinity", b"inf", b"N/A"])
    def test_values_that_json_does_not_have(self, tmp_path: Path, token: bytes) -> None:
        trace = read(tmp_path, broken("123", token))
        assert len(trace) == 4
        assert trace.losses == ("1 piece of invalid JSON in the file repaired",)

    def test_such_a_value_as_a_time_leaves_the_event_out(self, tmp_path: Path) -> None:
        trace = read(tmp_path, broken('"ts": 1', b'"ts": NaN'))
        assert {trace.names[name] for name in trace.host.name} == {"before", "after", "last"}
        assert trace.num_lost == 0
        assert "1 event without a time, left out" in trace.losses

    def test_words_inside_names_are_left_alone(self, tmp_path: Path) -> None:
        content = broken("123", b"NaN").replace(b"spot", b"f(x, nan, [inf: N/A])")
        trace = read(tmp_path, content)
        assert "f(x, nan, [inf: N/A])" in trace.names

    def test_control_characters(self, tmp_path: Path) -> None:
        trace = read(tmp_path, broken("spot", b"a\x01b\tc"))
        assert "a b c" in trace.names

    def test_stray_backslashes(self, tmp_path: Path) -> None:
        trace = read(tmp_path, broken("spot", rb"C:\Windows \u12 \\Good \"quoted\" \u0041"))
        assert 'C:\\Windows \\u12 \\Good "quoted" A' in trace.names

    def test_what_is_not_utf_8(self, tmp_path: Path) -> None:
        trace = read(tmp_path, broken("spot", b"a\xffb"))
        assert "a�b" in trace.names
        assert len(trace) == 4

    @pytest.mark.parametrize("size", [64, 8 << 20])
    def test_an_event_beyond_repair_is_lost_alone(self, tmp_path: Path, size: int) -> None:
        with blocks_of(size):
            trace = read(tmp_path, broken("spot", b'operator"" <unescaped>'))
        assert {trace.names[name] for name in trace.host.name} == {"before", "after", "last"}
        assert trace.num_lost == 1
        assert trace.losses == (), "it is not counted as repaired too"

    def test_an_event_beyond_repair_costs_others_their_own_repair_nothing(self, tmp_path: Path) -> None:
        content = broken("spot", b'operator"" <unescaped>').replace(b"after", b"after\x02\xff")
        assert "after �" in read(tmp_path, content).names

    @pytest.mark.parametrize("token", [b"NaN", b"N/A"])
    def test_the_whole_file_too(self, tmp_path: Path, token: bytes) -> None:
        content = json.dumps({"traceEvents": [{**operator("a", 0, 1), "args": {"v": 123}}]}).encode()
        trace = read(tmp_path, content.replace(b"123", token))
        assert (len(trace), trace.framing) == (1, "whole file")
        assert trace.losses == ("1 piece of invalid JSON in the file repaired",)

    def test_a_broken_head_costs_only_what_it_describes(self, tmp_path: Path) -> None:
        trace = read(tmp_path, kineto_text(EVENTS, **TOP).replace(b'"rank"', b'rank"'))
        assert (len(trace), trace.rank) == (4, None)
        assert trace.losses == ("the fields other than the events (devices, ranks) could not be read",)

    def test_a_broken_tail_costs_no_event(self, tmp_path: Path) -> None:
        trace = read(tmp_path, kineto_text(EVENTS, **TOP).replace(b'"t.json"', b'"t.json'))
        assert (len(trace), trace.rank) == (4, 3)
        assert trace.losses == ("the fields after the events could not be read",)


class TestRefused:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "the file is empty"),
            (b" \n ", "the file is empty"),
            (gzip.compress(b"", mtime=0), "the file is empty"),
            (b"{", "it is not JSON"),
            (b"PK\x03\x04", "it is an archive"),
            (b"[" * 100_000, "no timed event"),
            (b"3", 'no list "traceEvents"'),
            (b"{}", 'no list "traceEvents"'),
            (b'{"traceEvents": 3}', 'no list "traceEvents"'),
            (b'{"traceEvents": []}', "holds no timed event"),
            (b"[]", "holds no timed event"),
            (b"[3, null]", "holds no timed event"),
            (b'{"traceEvents": [{"ph": "M"}]}', "holds no timed event"),
            (b'[{"ph": "X", "name": "f", "ts": 1, "dur": 2}]', "holds no timed event of torch.profiler"),
        ],
    )
    def test_what_is_no_trace_is_refused_by_name(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "broken.json"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=rf"broken\.json.*{message}"):
            read_trace(path)

    def test_a_missing_file_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"nothing\.json cannot be read"):
            read_trace(tmp_path / "nothing.json")

    def test_a_folder_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(tmp_path)

    def test_plain_and_compressed_is_told_by_content_not_by_name(self, tmp_path: Path) -> None:
        plain = write_trace(tmp_path / "t.json.gz", [operator("a", 0, 1)])
        packed = tmp_path / "t.json"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        assert contents(read_trace(plain)) == contents(read_trace(packed))


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_real_traces_are_read_without_losing_a_nanosecond(name: str) -> None:
    """Decimal arithmetic on the file's own digits is the judge of the reader's floats."""
    path = trace_file(name)
    trace = read_trace(path)
    kinds = {"cpu_op", "operator", "kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
    events = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    timed = [e for e in events if e.get("ph") == "X" and str(e.get("cat")).lower() in kinds]
    starts = sorted(int(Decimal(e["ts"]) * 1000) for e in timed)
    lengths = sorted(int(Decimal(e["dur"]) * 1000) for e in timed)
    host = trace.host.kind == Kind.OPERATOR
    work = trace.work.kind != Kind.SYNC
    read_starts = np.concatenate([trace.host.start[host], trace.work.start[work]]) + trace.origin_ns
    read_ends = np.concatenate([trace.host.end[host], trace.work.end[work]]) + trace.origin_ns
    assert sorted(read_starts.tolist()) == starts
    assert sorted((read_ends - read_starts).tolist()) == lengths
    assert (trace.num_events, trace.losses) == (len(events), ())


@needs_traces
def test_real_traces_read_alike_in_pieces_and_at_once(tmp_path: Path) -> None:
    path = trace_file("hta_ddp_a100_rank0of2_nccl_args")
    data = json.loads(gzip.decompress(path.read_bytes()))
    whole = read(tmp_path, json.dumps(data).encode())
    chunked = read_trace(path)
    assert (whole.framing, chunked.framing) == ("whole file", "chunked")
    assert contents(whole) == contents(chunked)
