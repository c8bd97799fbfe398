"""Exports of Nsight Systems: `nsys export --type sqlite report.nsys-rep`.

The reader takes kernels, copies, memsets, CUDA API calls and NVTX ranges; ranges that PyTorch's `emit_nvtx` names
become operators. Tables are created lazily, and columns differ between versions: what is missing is left out. Only one
process is read, because every rank has a separate trace.

Source: "SQLite Schema Reference" in the Nsight Systems user guide (2021.5 to 2025.5; NVIDIA), with the event types and
memory kinds that it lists. Where a report has the tables `ENUM_...`, those name them.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from steptune.tuner.profiling.captures.translation import Thread, Translation, written_as
from steptune.tuner.profiling.events import Args
from steptune.tuner.profiling.trace import Trace, TraceError

WHAT = "an export of Nsight Systems"
AGAIN = "export the report again, with `nsys export --type sqlite`"
MARK = (
    'Mark them (`with torch.cuda.nvtx.range(f"step {n}"):` around each), and record with '
    "`nsys profile --trace=cuda,nvtx`"
)
KERNELS, COPIES, SETS, GRAPHS = (
    f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
)
CALLS, RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
DEVICE_TABLES = (KERNELS, COPIES, SETS, GRAPHS)
PUSH_POP, START_END, PUSH_POP_TEXT, START_END_TEXT = 59, 60, 70, 71
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
_VERSION = re.compile(r"(_v\d+|_pts[zd])+$")
_OPERATOR = re.compile(r"^(aten|c10d|autograd|torch)::")
_EMITTED = re.compile(r", (seq|op_id|sizes|input_op_ids) = .*$", re.DOTALL)
"""Suffix that `torch.autograd.profiler.emit_nvtx` appends to the name of an operator."""
_PROCESS = (1 << 24) - 1
"""Mask for 24 bits: a global thread id holds 24 bits for the process, then 24 bits for the thread."""
NOT_A_NUMBER = -1
LATEST_NS = 1 << 62
"""Latest supported time, in the year 2116: later ones overflow when added to event times."""
MOST_TEXT_BYTES = 1 << 20
"""Maximum length of a name, in bytes; template instantiations have tens of thousands."""


def read_nsight(path: Path) -> Trace:
    """Read the trace in an Nsight Systems export.

    Raises:
        TraceError: The file is no such export, is damaged or has no steps, or several processes work on devices.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_TEXT_BYTES)
            # A small file can have one long text in every row: rows share it.
            connection.text_factory = lru_cache(maxsize=1024)(lambda text: text.decode("utf-8", "replace"))
            with written_as(f"{WHAT} (2021.5 to 2025.5)", AGAIN):
                return _Export(connection).read()
    except sqlite3.Error as error:
        raise TraceError(f"the SQLite file cannot be read ({error}): {AGAIN}") from None


class _Export:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._columns = self._known_columns()
        self._names: dict[int, str] = dict(self._rows("StringIds", "id", "value"))
        self._translation = Translation(WHAT, MARK)

    def _known_columns(self) -> dict[str, frozenset[str]]:
        """Return the columns by table; views are left out, because exports contain none."""
        tables = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        found = {}
        for (name,) in tables:
            columns = self._connection.execute("SELECT name FROM pragma_table_info(?)", (name,)).fetchall()
            found[name] = frozenset(column for (column,) in columns)
        return found

    def _rows(self, table: str, *columns: str, where: str = "") -> Iterator[tuple[Any, ...]]:
        """Yield rows of columns of a table; null for missing columns, nothing for a missing table."""
        known = self._columns.get(table, frozenset())
        if not known:
            return iter(())
        selected = ", ".join(f'"{column}"' if column in known else "NULL" for column in columns)
        return self._connection.execute(f'SELECT {selected} FROM "{table}" {where}')

    def read(self) -> Trace:
        if "StringIds" not in self._columns or not {*DEVICE_TABLES, RANGES, CALLS} & set(self._columns):
            raise TraceError(self._refusal())
        self._process = self._only_process()
        self._take_ranges()
        self._take_calls()
        self._take_kernels()
        self._take_copies()
        epoch_ns = next(self._rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"), (0,))[0] or 0
        if not 0 <= epoch_ns < LATEST_NS:
            raise ValueError(f"its start time, {epoch_ns} ns after 1970, is out of range")
        return self._translation.trace(devices=self._devices(), epoch_ns=epoch_ns)

    def _refusal(self) -> str:
        if any(name.startswith("rocpd_") for name in self._columns):
            return (
                "it is a database of rocprofv3 (rocpd): convert it with `rocpd convert --output-format csv`, and pass "
                "the table that ends in _kernel_trace.csv"
            )
        return (
            "it is an SQLite file, but not a Nsight Systems export with CUDA activity (required tables: StringIds, "
            f"{KERNELS}, {CALLS} and {RANGES}): record with `nsys profile --trace=cuda,nvtx`, and export the report "
            "with `nsys export --type sqlite`"
        )

    def _only_process(self) -> int | None:
        """Return the only process that works on devices; None if the export does not tell processes apart."""
        found = {
            (row[0] >> 24) & _PROCESS
            for table in DEVICE_TABLES
            for row in self._rows(table, "globalPid", where="GROUP BY 1")
            if row[0] is not None
        }
        if len(found) > 1:
            raise TraceError(
                f"it is a Nsight Systems export in which {len(found)} processes use devices (process "
                f"{', '.join(map(str, sorted(found)))}), but a trace must cover one rank: record a separate report "
                "for every rank (`nsys profile -o rank%q{RANK} ...` inside torchrun), and pass all exports"
            )
        return next(iter(found), None)

    def _thread(self, number: int | None) -> Thread | None:
        """Return the process and the thread of a global thread id; None for a thread of another process."""
        if number is None:
            return 0, 0
        process = (number >> 24) & _PROCESS
        return (process, number & _PROCESS) if self._process in (None, process) else None

    def _text(self, text: str | None, number: int | None) -> str:
        return text or (self._names.get(number, "") if number is not None else "")

    def _take_ranges(self) -> None:
        kinds = (PUSH_POP, START_END, PUSH_POP_TEXT, START_END_TEXT)
        for start, end, kind, text, number, thread_id in self._rows(
            RANGES, "start", "end", "eventType", "text", "textId", "globalTid"
        ):
            thread = self._thread(thread_id)
            if thread is None or start is None or end is None or end < start or kind not in (*kinds, None):
                continue
            name = _EMITTED.sub("", self._text(text, number))
            if _OPERATOR.match(name):
                self._translation.host("cpu_op", name, start, end, thread)
            elif name:
                self._translation.annotation(name, start, end, thread)

    def _take_calls(self) -> None:
        for start, end, number, thread_id, correlation in self._rows(
            CALLS, "start", "end", "nameId", "globalTid", "correlationId"
        ):
            thread = self._thread(thread_id)
            if thread is not None and start is not None and end is not None:
                name = _VERSION.sub("", self._names.get(number, ""))
                self._translation.host("cuda_runtime", name, start, end, thread, correlation=_number(correlation))

    def _take_kernels(self) -> None:
        for start, end, *where, full, short, node in self._rows(
            KERNELS, *_PLACE, "demangledName", "shortName", "graphNodeId"
        ):
            name = self._names.get(full) or self._names.get(short) or ""
            self._operation("kernel", name, start, end, where, graph_node=_number(node))
        for start, end, *where, graph in self._rows(GRAPHS, *_PLACE, "graphId"):
            self._operation("kernel", f"CUDA graph {graph}, recorded as a whole", start, end, where)

    def _take_copies(self) -> None:
        kinds, memory = (
            self._labels("ENUM_CUDA_MEMCPY_OPER", COPY_KINDS),
            self._labels("ENUM_CUDA_MEM_KIND", MEMORY_KINDS),
        )
        for start, end, *where, num_bytes, kind, source, target in self._rows(
            COPIES, *_PLACE, "bytes", "copyKind", "srcKind", "dstKind"
        ):
            ends = f" ({memory.get(source, '?')} -> {memory.get(target, '?')})" if source is not None else ""
            name = f"Memcpy {kinds.get(kind, '')}{ends}"
            self._operation("gpu_memcpy", name, start, end, where, num_bytes=_number(num_bytes))
        for start, end, *where, num_bytes in self._rows(SETS, *_PLACE, "bytes"):
            self._operation("gpu_memset", "Memset (Device)", start, end, where, num_bytes=_number(num_bytes))

    def _labels(self, table: str, known: dict[int, str]) -> dict[int, str]:
        """Return an enumeration's labels in torch.profiler's terms: "HtoD" for "Host-to-Device"."""
        labels = {number: str(label) for number, label in self._rows(table, "id", "label")}
        words = {number: re.sub(r"(\w)\w*-to-(\w)\w*", r"\1to\2", label) for number, label in labels.items()}
        return {**known, **words}

    def _operation(
        self,
        kind: str,
        name: str,
        start: int | None,
        end: int | None,
        where: Sequence[int | None],
        num_bytes: int = NOT_A_NUMBER,
        graph_node: int = NOT_A_NUMBER,
    ) -> None:
        if start is None or end is None:
            return
        device, stream, correlation = map(_number, where)
        args = Args(device=device, stream=stream, correlation=correlation, num_bytes=num_bytes, graph_node=graph_node)
        self._translation.operation(kind, name, start, end, args)

    def _devices(self) -> list[dict[str, Any]]:
        columns = ("id", "name", "totalMemory", "smCount", "computeMajor", "computeMinor")
        keys = ("id", "name", "totalGlobalMem", "numSms", "computeMajor", "computeMinor")
        return [dict(zip(keys, row, strict=True)) for row in self._rows("TARGET_INFO_GPU", *columns)]


_PLACE = ("start", "end", "deviceId", "streamId", "correlationId")


def _number(value: int | None) -> int:
    return value if isinstance(value, int) else NOT_A_NUMBER
