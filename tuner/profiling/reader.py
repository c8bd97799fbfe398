"""Reading a trace file: `.json` or `.json.gz`, of any size, in chunks; other profilers' files are translated
(`captures`).

Kineto writes every event's end on a line of its own, indented by two spaces, and a JSON string cannot
hold a raw line break: a file in that layout is cut there and decoded piece by piece, so that it is
never in memory as a whole. Any other layout is decoded at once ("whole file"). In both cases, broken text
is repaired if that is safe (NaN, control characters, stray backslashes), or left out and
counted; from a truncated file the complete events are read.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from steptune.tuner.profiling.captures.recognised import translator
from steptune.tuner.profiling.columns import Columns
from steptune.tuner.profiling.decoded_size import check_decoded_size, joined
from steptune.tuner.profiling.events import Event, EventFile, ExactEvent, ExactEventFile, Header, loose_event
from steptune.tuner.profiling.times import InexactTimesError
from steptune.tuner.profiling.trace import Trace, TraceError
from steptune.tuner.wording import counted

BLOCK_BYTES = 1 << 19
"""Length of the text decoded at once, in bytes. The events of a larger block take more memory, and more time, because
no cache holds them.
"""
SEPARATOR = b"\n  },"
EVENT_END = SEPARATOR[:-1]
HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
KINETO_HEAD = re.compile(HEAD.pattern + rb"(?=\s*?\n  \{)")
MOST_DECODED_BYTES = 8 << 30
"""Maximum memory, in bytes, of a decoded file with a layout other than Kineto's; events take about five times their
size as text.
"""
MARGIN = 64
"""Number of bytes that must follow the match of `HEAD` before `KINETO_HEAD` can be tested."""
END = re.compile(rb"\n {0,2}\]")
_EVENTS = msgspec.json.Decoder(list[Event])
_EXACT_EVENTS = msgspec.json.Decoder(list[ExactEvent])
_FILE = msgspec.json.Decoder(EventFile)
_EXACT_FILE = msgspec.json.Decoder(ExactEventFile)
_HEADER = msgspec.json.Decoder(Header)
_LOOSE = msgspec.json.Decoder(float_hook=Decimal)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_STRING_OR_NOT_JSON = re.compile(rb'("(?:[^"\\\n]|\\.)*")|-?\b(?:NaN|nan|Infinity|inf|N/A)\b')
_BACKSLASH = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_CONTROL = bytes(32 if code < 32 and code != 10 else code for code in range(256))


def read_trace(path: Path) -> Trace:
    """Read the trace in a file.

    Raises:
        TraceError: The file cannot be opened, is empty, is not a trace, or holds no timed event.
    """
    try:
        translate = translator(path)
        with _no_collections():
            if translate is not None:
                return translate(path)
            with path.open("rb") as file:
                return _Reader(_Blocks(file)).read()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


@contextmanager
def _no_collections() -> Iterator[None]:
    """Suspend garbage collection while decoding, which makes millions of objects and no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Blocks:
    """Uncompressed content of a file, in blocks. `problem` describes the error in a compressed file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.problem = ""

    def __iter__(self) -> Iterator[bytes]:
        start = self._file.read(2)
        self._file.seek(0)
        return _ahead(self._compressed() if start == b"\x1f\x8b" else self._plain())

    def _plain(self) -> Iterator[bytes]:
        while block := self._file.read(BLOCK_BYTES):
            yield block

    def _compressed(self) -> Iterator[bytes]:
        from isal import igzip_lib

        data = self._file.read(BLOCK_BYTES)
        while data.startswith(b"\x1f\x8b"):
            stream = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            while not stream.eof:
                if stream.needs_input and not (data := data or self._file.read(BLOCK_BYTES)):
                    self.problem = "the compressed file is truncated"
                    return
                try:
                    block = stream.decompress(data, BLOCK_BYTES)
                except igzip_lib.IsalError as error:  # type: ignore[misc]  # the stub says it is no class
                    self.problem = f"the compressed file is damaged ({error})"
                    return
                data = b""
                if block:
                    yield block
            data = stream.unused_data
            if len(data) < 2:
                data += self._file.read(BLOCK_BYTES)


def _ahead(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks while a separate thread prepares the next one: decompressing releases the interpreter lock."""
    with ThreadPoolExecutor(1, thread_name_prefix="steptune-read") as thread:
        following = thread.submit(next, blocks, b"")
        while block := following.result():
            following = thread.submit(next, blocks, b"")
            yield block


def _start(blocks: Iterator[bytes]) -> tuple[bytes, int]:
    """Return the beginning of a file, up to its first events, and the offset of those events. The offset is 0 if the
    file's layout is not Kineto's.
    """
    start, position = b"", 0
    while block := _following(blocks, len(start)):
        start = joined([start, block])
        head = HEAD.search(start, position)
        if start.startswith(b"[") or (head is not None and len(start) >= head.end() + MARGIN):
            break
        position = max(0, len(start) - 2 * MARGIN)
    events = KINETO_HEAD.search(start, position)
    return start, events.end() if events is not None else 0


def _following(blocks: Iterator[bytes], least: int) -> bytes:
    """Return the next block, or several blocks that together have at least `least` bytes; empty at the end.

    Text without the end of an event is read on in steps as long as itself: each byte is copied a few times at most.
    """
    parts, length = [], 0
    for block in blocks:
        parts.append(block)
        length += len(block)
        if length >= least:
            break
    return joined(parts) if len(parts) > 1 else b"".join(parts)


class _Reader:
    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks
        self._columns = Columns()
        self._num_lost = 0
        self._num_repaired = 0
        self._losses: list[str] = []
        self._is_whole = True
        self._exact = False

    def read(self) -> Trace:
        blocks = iter(self._blocks)
        start, events = _start(blocks)
        if events:
            header = self._read_chunks(start[:events], start[events:], blocks)
        else:
            header = self._read_whole(joined(chain([start], blocks)))
        if self._blocks.problem:
            self._losses.insert(0, self._blocks.problem)
        if self._num_repaired:
            self._losses.append(f"{counted(self._num_repaired, 'piece')} of invalid JSON in the file, repaired")
        return self._columns.finish(
            header,
            framing="chunked" if events else "whole file",
            num_lost=self._num_lost,
            is_whole=self._is_whole and not self._blocks.problem,
            losses=self._losses,
        )

    # --- in pieces --------------------------------------------------------------------------------

    def _read_chunks(self, head: bytes, block: bytes, blocks: Iterator[bytes]) -> Header:
        rest = b""
        while block:
            cut = block.rfind(SEPARATOR)
            if cut < 0:
                block, rest = joined([rest, block]), b""
                cut = block.rfind(SEPARATOR)
            end = cut + len(EVENT_END)
            if cut < 0:
                rest = block
            elif self._take_piece(piece := b"".join((b"[", rest, memoryview(block)[:end], b"]"))):
                rest = block[end + 1 :]
            else:
                rest = joined(chain([piece[1:-1], block[end:]], blocks))
            block = _following(blocks, len(rest))
        return self._read_end(head, rest)

    def _read_end(self, head: bytes, rest: bytes) -> Header:
        """Read the last event and the text after the events; return the header fields in that text."""
        end = self._read_object(b'{"traceEvents":[' + rest)
        return _merged(self._read_head(head), end) if end is not None else self._recover(head, rest)

    def _take_piece(self, text: bytes) -> bool:
        """Add a chunk of the list of events, repaired if necessary; return False if the chunk reaches beyond the list's
        end.
        """
        if self._take(text):
            return True
        if END.search(text):
            return False
        lost = self._num_lost
        if not self._take(_repaired(text)):
            self._take_one_by_one(text)
        # What is lost is said as such.
        self._num_repaired += self._num_lost == lost
        return True

    def _take(self, text: bytes) -> bool:
        """Add a list of events, decoded as strictly as possible; return False if it is not JSON."""
        try:
            self._take_typed(text, _EVENTS, _EXACT_EVENTS)
        except msgspec.ValidationError:
            rows = _loosely(text)
            if rows is None:
                return False
            self._take_loose(rows)
        except _UNREADABLE:
            return False
        return True

    def _take_typed(self, text: bytes, plain: msgspec.json.Decoder[Any], exact: msgspec.json.Decoder[Any]) -> Any:
        """Decode events with times as floats if those are exact, else with times as text."""
        if not self._exact:
            decoded = plain.decode(text)
            try:
                self._columns.take(_events(decoded))
            except InexactTimesError:
                self._exact = True
            else:
                return decoded
        decoded = exact.decode(text)
        self._columns.take(_events(decoded), exact=True)
        return decoded

    def _take_one_by_one(self, text: bytes) -> None:
        """Add the events of a damaged chunk that can be decoded individually."""
        rows = []
        for part in text[1:-1].split(EVENT_END):
            event = part.lstrip(b" \n,")
            if not event:
                continue
            row = _loosely(event + EVENT_END) or _loosely(_repaired(event.replace(b"\n", b" ")) + EVENT_END)
            if row is None:
                self._num_lost += 1
            else:
                rows.append(row)
        self._take_loose(rows)

    def _take_loose(self, rows: Any) -> None:
        """Add events whose fields have unusual types."""
        events = [event for row in rows if (event := loose_event(row)) is not None]
        self._num_lost += len(rows) - len(events)
        self._columns.take(events, exact=True)

    # --- as a whole -------------------------------------------------------------------------------

    def _read_whole(self, text: bytes) -> Header:
        """Read a file whose layout is not Kineto's: an object with "traceEvents", or a bare list of events."""
        if not text.strip():
            raise TraceError(self._blocks.problem or "the file is empty")
        header = self._read_object(text)
        if header is not None:
            return header
        head = HEAD.search(text)
        if head is not None:
            return self._recover(text[: head.end()], text[head.end() :])
        if text.lstrip().startswith(b"["):
            return self._recover(b'{"traceEvents":[', text.lstrip()[1:])
        raise TraceError(f"it is not a trace of torch.profiler: it is not JSON{self._because()}")

    def _because(self) -> str:
        return f" ({self._blocks.problem})" if self._blocks.problem else ""

    def _read_object(self, text: bytes) -> Header | None:
        """Decode a text, after a repair if necessary; None if it is not JSON even then."""
        check_decoded_size(text, MOST_DECODED_BYTES)
        header = self._decoded(text)
        if header is None:
            header = self._decoded(_repaired(text))
            self._num_repaired += header is not None
        return header

    def _decoded(self, text: bytes) -> Header | None:
        """Decode a text by the strictest types that its contents match; None if it is not JSON."""
        try:
            header: Header = self._take_typed(text, _FILE, _EXACT_FILE)
        except msgspec.ValidationError:
            data = _loosely(text)
            return None if data is None else self._take_loose_file(data)
        except _UNREADABLE:
            return None
        return header

    def _take_loose_file(self, data: Any) -> Header:
        if isinstance(data, list):
            self._take_loose(data)
            return Header()
        if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
            raise TraceError('it is JSON, but not a trace: it has no list "traceEvents"')
        self._take_loose(data["traceEvents"])
        return msgspec.convert(data, Header)

    # --- what is broken ---------------------------------------------------------------------------

    def _recover(self, head: bytes, text: bytes) -> Header:
        """Decode event by event up to the point where the file breaks off."""
        scan = json.JSONDecoder(strict=False, parse_float=Decimal).raw_decode
        source = _repaired(text).decode()
        position, rows, ended = 0, [], False
        while not ended and (opening := source.find("{", position)) >= 0:
            try:
                row, position = scan(source, opening)
            except (ValueError, RecursionError):
                self._num_lost += 1
                break
            rows.append(row)
            ended = source[position : position + 64].lstrip().startswith("]")
        self._take_loose(rows)
        if ended:
            self._losses.append("the fields after the events could not be read")
        else:
            self._is_whole = False
            self._losses.append("the file is truncated or damaged: only the events before the damage were read")
        return self._read_head(head)

    def _read_head(self, head: bytes) -> Header:
        """Read the header before the events."""
        for text in (head + b"]}", _repaired(head + b"]}")):
            try:
                return _HEADER.decode(text)
            except _UNREADABLE:
                continue
        self._losses.append("the fields other than the events (devices, ranks) could not be read")
        return Header()


def _events(decoded: Any) -> Any:
    return decoded if isinstance(decoded, list) else decoded.trace_events


def _loosely(text: bytes) -> Any:
    """Parse JSON without checks; None if it is not JSON."""
    try:
        return _LOOSE.decode(text)
    except _UNREADABLE:
        return None


def _repaired(text: bytes) -> bytes:
    """Remove sequences that trace writers produce although JSON does not allow them."""
    text = text.translate(_CONTROL).decode("utf-8", "replace").encode()
    text = _BACKSLASH.sub(lambda match: match[0] if match[1] else rb"\\", text)
    return _STRING_OR_NOT_JSON.sub(lambda match: match[1] or b"null", text)


def _merged(head: Header, end: Header) -> Header:
    """Merge the header fields before the events with those after them."""
    either = {name: getattr(head, name) or getattr(end, name) for name in Header.__struct_fields__}
    return Header(**either)
