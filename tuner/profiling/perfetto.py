"""Export of the analysis as tracks for ui.perfetto.dev: categories, phases, steps and long gaps of every device.

The format is Chrome's JSON trace events, as Kineto writes them: microseconds with three decimals, so
that nanoseconds stay exact. A single trace is written together with its own events, which pass through
unchanged, below Steptune's tracks. For several ranks only the tracks are written, on
one clock.

Source: "Trace Event Format" (Google, 2016), which Perfetto's JSON importer reads.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.profiling.capture import PHASES, Capture, link
from steptune.tuner.profiling.cpu_time import cpu_time
from steptune.tuner.profiling.device_time import device_time
from steptune.tuner.profiling.gaps import NO_ROW, Gaps
from steptune.tuner.profiling.reader import HEAD, read_trace
from steptune.tuner.profiling.segments import Segments
from steptune.tuner.profiling.trace import TRANSLATED, Trace, TraceError

LONG_GAP_NS = 20_000
FIRST_PID = 1 << 30
"""First process id of Steptune's tracks: above every Linux process (at most 2^22) and device number, so unused in
traces.
"""
SORT_FIRST = -(1 << 20)
CATEGORY = "steptune"
"""Category of Steptune's events; Steptune's reader of traces leaves them out."""
BLOCK_BYTES = 8 << 20
MAX_HEAD_BYTES = 64 << 20
_BARE_LIST = re.compile(rb"\A\s*\[")


def write_perfetto(
    sources: Sequence[Path],
    target: Path,
    *,
    long_gap_ns: int = LONG_GAP_NS,
    clock_offsets_ns: Mapping[int, int] | None = None,
) -> None:
    """Write Steptune's tracks. With a single trace, the file also contains the trace's own events.

    Args:
        sources: Files of `torch.profiler`; for files of other profilers only the tracks are written.
        target: File to write; compressed if its name ends in `.gz`.
        long_gap_ns: Minimum length of a gap that gets a name.
        clock_offsets_ns: Offset of each rank, added to its times.

    Raises:
        TraceError: A source is no trace, or would be overwritten.
    """
    for source in sources:
        if source.resolve() == target.resolve():
            raise TraceError(f"{target} is the trace itself: write to another file")
    traces = [read_trace(source) for source in sources]
    first_base = min(trace.base_time_ns for trace in traces)
    offsets = clock_offsets_ns or {}
    numbers = iter(range(FIRST_PID, 1 << 31))
    ranks = [trace.rank if trace.rank is not None else number for number, trace in enumerate(traces)]
    lines = (
        line
        for rank, trace in zip(ranks, traces, strict=True)
        for line in _track_lines(
            trace,
            numbers,
            shift_ns=trace.origin_ns + trace.base_time_ns - first_base + offsets.get(rank, 0),
            prefix=f"rank {rank} " if len(traces) > 1 else "",
            long_gap_ns=long_gap_ns,
        )
    )
    try:
        with _opened(target, "wb") as file:
            if len(sources) == 1 and traces[0].framing != TRANSLATED:
                _merge(sources[0], file, lines)
            else:
                _write_alone(file, lines, first_base)
    except (EOFError, zlib.error):
        target.unlink(missing_ok=True)
        raise TraceError(
            f"{sources[0]} is truncated or damaged, but tracks can be added only to a complete trace: analyse it "
            "without tracks"
        ) from None
    except OSError as error:
        raise TraceError(f"{target} cannot be written: {error.strerror or error}") from None


def _write_alone(file: IO[bytes], lines: Iterator[str], base_time_ns: int) -> None:
    file.write(f'{{"displayTimeUnit": "ms", "baseTimeNanoseconds": {base_time_ns}, "traceEvents": [\n'.encode())
    file.write(next(lines).encode())
    for line in lines:
        file.write(b",\n" + line.encode())
    file.write(b"\n]}\n")


def _merge(source: Path, target: IO[bytes], lines: Iterator[str]) -> None:
    """Copy a trace, and insert Steptune's events before its first event; a valid trace has at least one."""
    with _opened(source, "rb") as file:
        start = b""
        while (head := HEAD.search(start) or _BARE_LIST.match(start)) is None:
            block = file.read(BLOCK_BYTES)
            if not block or len(start) > MAX_HEAD_BYTES:
                raise TraceError(f'{source} has no list "traceEvents" to write into')
            start += block
        target.write(start[: head.end()] + b"\n")
        for line in lines:
            target.write(line.encode() + b",\n")
        target.write(start[head.end() :])
        while block := file.read(BLOCK_BYTES):
            target.write(block)


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[IO[bytes]]:
    """Open a plain or compressed file; compressed output has neither time nor name in its header."""
    compressed = path.suffix == ".gz" if mode == "wb" else _is_compressed(path)
    with path.open(mode) as file:
        if not compressed:
            yield cast(IO[bytes], file)
            return
        with gzip.GzipFile(filename="", fileobj=cast(IO[bytes], file), mode=mode, compresslevel=3, mtime=0) as inside:
            yield cast(IO[bytes], inside)


def _is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


# --- our events --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Tracks:
    """Tracks of one device, shown in Perfetto as one process, with the shift of the device's clock."""

    pid: int
    shift_ns: int

    def named(self, title: str, threads: Sequence[str]) -> Iterator[str]:
        yield self._meta("process_name", 0, {"name": title})
        yield self._meta("process_sort_index", 0, {"sort_index": SORT_FIRST + self.pid - FIRST_PID})
        for number, name in enumerate(threads, 1):
            yield self._meta("thread_name", number, {"name": name})
            yield self._meta("thread_sort_index", number, {"sort_index": number})

    def event(self, thread: int, name: str, start_ns: int, end_ns: int, args: str = "{}") -> str:
        """Return one event as JSON; `name` and `args` are JSON already."""
        ts = _microseconds(self.shift_ns + start_ns)
        return (
            f'{{"ph": "X", "cat": "{CATEGORY}", "name": {name}, "pid": {self.pid}, "tid": {thread}, '
            f'"ts": {ts}, "dur": {_microseconds(end_ns - start_ns)}, "args": {args}}}'
        )

    def _meta(self, name: str, thread: int, args: dict[str, Any]) -> str:
        return json.dumps({"ph": "M", "name": name, "pid": self.pid, "tid": thread, "ts": 0, "args": args})


def _microseconds(time_ns: int) -> str:
    """Format a time as exact microseconds in text, because a float could not hold them."""
    sign, time_ns = ("-", -time_ns) if time_ns < 0 else ("", time_ns)
    return f"{sign}{time_ns // 1000}.{time_ns % 1000:03d}"


def _track_lines(trace: Trace, pids: Iterator[int], *, shift_ns: int, prefix: str, long_gap_ns: int) -> Iterator[str]:
    capture = link(trace)
    for device in capture.device_numbers:
        segments, gaps = device_time(capture, device)
        tracks = _Tracks(pid=next(pids), shift_ns=shift_ns)
        yield from _device_lines(capture, tracks, f"Steptune: {prefix}cuda:{device}", segments)
        yield from _gap_lines(capture, tracks, gaps, long_gap_ns)
    if not capture.device_numbers:
        tracks = _Tracks(pid=next(pids), shift_ns=shift_ns)
        yield from _device_lines(capture, tracks, f"Steptune: {prefix}cpu", cpu_time(capture))


def _device_lines(capture: Capture, tracks: _Tracks, title: str, segments: Segments) -> Iterator[str]:
    yield from tracks.named(title, ("steps", "time categories", "phase", "long gaps"))
    boundaries = capture.steps.boundaries.tolist()
    for number, (low, high) in enumerate(pairwise(boundaries), 1):
        yield tracks.event(1, json.dumps(f"step {number}"), low, high)
    titles = [json.dumps(info.title) for info in CATEGORIES]
    args = [json.dumps({"category": info.category.value, "group": info.group}) for info in CATEGORIES]
    for low, high, code in _rows(segments.start, segments.end, segments.category):
        yield tracks.event(2, titles[code], low, high, args[code])
    phases = [json.dumps(phase.value) for phase in PHASES]
    start, end, phase = segments.phases
    known = phase >= 0
    for low, high, code in _rows(start[known], end[known], phase[known]):
        yield tracks.event(3, phases[code], low, high)


def _gap_lines(capture: Capture, tracks: _Tracks, gaps: Gaps, long_gap_ns: int) -> Iterator[str]:
    """Yield gaps named by their main cause, with all causes and the kernel that ends each gap."""
    trace = capture.trace
    long = np.flatnonzero(gaps.end - gaps.start >= long_gap_ns)
    first = np.searchsorted(gaps.piece_gap, long, side="left")
    last = np.searchsorted(gaps.piece_gap, long, side="right")
    for gap, low, high in zip(long.tolist(), first.tolist(), last.tolist(), strict=True):
        causes: dict[str, int] = {}
        pieces = _rows(gaps.piece_start[low:high], gaps.piece_end[low:high], gaps.piece_category[low:high])
        for start, end, code in pieces:
            causes[CATEGORIES[code].title] = causes.get(CATEGORIES[code].title, 0) + end - start
        row = int(gaps.next_row[gap])
        ended_by = trace.names[trace.work.name[row]] if row != NO_ROW else "the end of the steps"
        name = json.dumps(f"gap: {max(causes, key=lambda cause: causes[cause])}")
        args = json.dumps({"ended by": ended_by, **{f"{cause} (ns)": value for cause, value in causes.items()}})
        yield tracks.event(4, name, int(gaps.start[gap]), int(gaps.end[gap]), args)


def _rows(start: np.ndarray, end: np.ndarray, code: np.ndarray) -> Iterator[tuple[int, int, int]]:
    return zip(start.tolist(), end.tolist(), code.tolist(), strict=True)
