"""Files of a profiled trial for the result pages: JSON with one record per line. The files are read line by line, and
the length of a line is limited.

User code runs beside the process that writes them and may replace them by anything. A line is decoded by itself and is
never longer than `MAX_LINE_BYTES`: so checking a file takes no more memory than one line, whatever the file holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO, TypeVar

import msgspec
from msgspec.structs import replace

from steptune.tuner.profiling.analysis import without_timelines
from steptune.tuner.profiling.tiles import shown_lanes
from steptune.tuner.trace_records import Lane, RankAnalysis, Timeline, TraceAnalysis
from steptune.tuner.trials.study_files import StudyFiles

MAX_LINE_BYTES = 4 << 20
"""Maximum bytes of a line. One lane (of a device, stream or thread) takes less, and so does a rank's analysis without
its lanes.
"""
MAX_TIMELINE_BYTES = 64 << 20
"""Maximum bytes of a timelines file: enough for more than 200 devices at 0.25 MB each."""
MAX_ANALYSIS_BYTES = 16 << 20
MAX_LANES_BYTES = 96 << 20
"""Maximum bytes of a file of lanes: enough for as many lanes of maximum size as a result page has rows."""
Kind = TypeVar("Kind", bound=msgspec.Struct)
_LIST, _ANALYSIS = b"[", b'{"ranks":['


def keep_analysis(files: StudyFiles, trial_id: str, analysis: TraceAnalysis) -> None:
    """Write the analysis of a trial to files for result pages, which never read a trace."""
    timelines = [timeline for rank in analysis.ranks for timeline in rank.timelines]
    files.timelines(trial_id).write_bytes(timelines_text(timelines))
    files.lanes(trial_id).write_bytes(lanes_text(shown_lanes(analysis)[0]))
    files.analysis(trial_id).write_bytes(analysis_text(without_timelines(analysis)))


def timelines_text(timelines: Iterable[Timeline]) -> bytes:
    """Return timelines as a JSON array, one timeline per line."""
    return _text(_LIST, timelines, b"]")


def analysis_text(analysis: TraceAnalysis) -> bytes:
    """Return a `TraceAnalysis` as a JSON object, one rank per line."""
    rest = msgspec.json.encode(replace(analysis, ranks=()))
    return _text(_ANALYSIS, analysis.ranks, rest.removeprefix(_ANALYSIS))


def lanes_text(lanes: Iterable[Lane]) -> bytes:
    """Return the lanes of devices, streams and threads as a JSON array, one lane per line."""
    return _text(_LIST, lanes, b"]")


def read_timelines(file: BinaryIO) -> Iterator[Timeline]:
    """Yield the timelines of a file one by one.

    Raises:
        ValueError: The file does not have the format of `timelines_text`, or is too large; the message names the line.
    """
    return _read_list(file, Timeline, MAX_TIMELINE_BYTES)


def read_lanes(file: BinaryIO) -> Iterator[Lane]:
    """Yield the lanes (of devices, streams and threads) in a file one by one.

    Raises:
        ValueError: The file does not have the format of `lanes_text`, or is too large; the message names the line.
    """
    return _read_list(file, Lane, MAX_LANES_BYTES)


def _read_list(file: BinaryIO, kind: type[Kind], max_bytes: int) -> Iterator[Kind]:
    for number, text, is_last in _lines(file, _LIST, max_bytes):
        if is_last and text != b"]":
            raise ValueError(
                f"line {number} follows the last {kind.__name__.lower()} and must contain only a closing bracket"
            )
        if not is_last:
            yield _decoded(text, kind, number)


def read_analysis(file: BinaryIO) -> Iterator[RankAnalysis | TraceAnalysis]:
    """Yield the ranks of an analysis file one by one, and finally the analysis without them.

    Raises:
        ValueError: The file does not have the format of `analysis_text`, or is too large; the message names the line.
    """
    for number, text, is_last in _lines(file, _ANALYSIS, MAX_ANALYSIS_BYTES):
        if is_last:
            yield _decoded(_ANALYSIS + text, TraceAnalysis, number)
        else:
            yield _decoded(text, RankAnalysis, number)


def _text(begin: bytes, records: Iterable[msgspec.Struct], end: bytes) -> bytes:
    lines = b",\n".join(map(msgspec.json.encode, records))
    return b"\n".join([begin, *([lines] if lines else []), end]) + b"\n"


def _lines(file: BinaryIO, begin: bytes, max_bytes: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the number of each line, its text without the comma, and whether it is the last line."""
    size = _check(file.readline(MAX_LINE_BYTES + 1), begin + b"\n")
    number, comma, is_last = 1, True, False
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        size += len(line)
        if size > max_bytes or len(line) > MAX_LINE_BYTES:
            limit = MAX_LINE_BYTES if len(line) > MAX_LINE_BYTES else max_bytes
            raise ValueError(f"line {number} exceeds the limit of {limit:,} bytes")
        first, is_last = number == 2, line.startswith(b"]")
        if not line.endswith(b"\n") or (comma == is_last and not first):
            raise ValueError(f"line {number} must be a record followed by a comma, or the last record")
        text = line.removesuffix(b"\n")
        comma = text.endswith(b",")
        yield number, text if is_last else text.removesuffix(b","), is_last
        if is_last:
            break
    if not is_last or file.read(1):
        raise ValueError(f"line {number} must close the list and be the last line of the file")


def _check(line: bytes, begin: bytes) -> int:
    if line != begin:
        raise ValueError(f"line 1 must be {begin.decode().strip()!r}")
    return len(line)


def _decoded(text: bytes, kind: type[Kind], number: int) -> Kind:
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError, AssertionError) as error:
        raise ValueError(f"line {number} is no {kind.__name__}: {error}") from error
