"""Results of rocprofv3: `PID_results.json` (`--output-format json`) or the tables of `--output-format csv`.

Both have kernels and copies of devices, calls of HIP, and ranges of ROCTx, linked by correlation ids. The tables
are files in one folder with a common prefix: `PID_kernel_trace.csv` names all of them. Results in rocpd's or Perfetto's
format are not read: rocprofv3 and `rocpd convert` write the supported formats.

Source: "Using rocprofv3" and "Output formats" in the documentation of ROCprofiler-SDK (6.2 to 7.1; AMD).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from steptune.tuner.profiling.captures.translation import Translation, written_as
from steptune.tuner.profiling.captures.whole_files import json_of
from steptune.tuner.profiling.events import Args
from steptune.tuner.profiling.trace import Trace, TraceError

MARK = (
    'Mark them (`torch.cuda.nvtx.range_push(f"step {n}")` is ROCTx on AMD), and record with `rocprofv3 --hip-trace '
    "--kernel-trace --memory-copy-trace --marker-trace`"
)
WHAT = "a result of rocprofv3"
VERSIONS = "(6.2 to 7.1)"
BEGINNING = b'"rocprofiler-sdk-tool"'
KERNELS_CSV = "_kernel_trace.csv"
GPU = 2
"""Type number by which rocprofv3 marks GPU agents."""
_DIRECTIONS = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD", "HOST_TO_HOST": "HtoH"}


def read_rocprof_json(path: Path) -> Trace:
    """Read the trace in a JSON result.

    Raises:
        TraceError: The result cannot be read, contains several processes, or has no steps.
    """
    with written_as(f"{WHAT} {VERSIONS}", "try `--output-format csv`"):
        found = json_of(path)["rocprofiler-sdk-tool"]
        tools = found if isinstance(found, list) else [found]
        if len(tools) != 1:
            raise TraceError(
                f"it is {WHAT} with {len(tools)} processes, but a trace must cover one process: write one file "
                "per process"
            )
        return _Result(tools[0]).read()


class _Result:
    def __init__(self, tool: Mapping[str, Any]) -> None:
        self._tool = tool
        self._records: Mapping[str, Any] = tool["buffer_records"]
        self._kinds: list[Mapping[str, Any]] = tool["strings"]["buffer_records"]
        gpus = [agent for agent in tool["agents"] if agent["type"] == GPU]
        self._gpus = {agent["id"]["handle"]: number for number, agent in enumerate(gpus)}
        self._devices = [
            {"id": number, "name": agent.get("product_name") or agent.get("name")} for number, agent in enumerate(gpus)
        ]
        self._process = int(tool.get("metadata", {}).get("pid", 0))
        self._translation = Translation(WHAT, MARK)

    def read(self) -> Trace:
        ranges = {entry["key"]: entry["value"] for entry in self._tool["strings"].get("marker_api", ())}
        for row in self._of("marker_api"):
            name = ranges.get(row["correlation_id"]["internal"])
            if name:
                self._translation.annotation(str(name), *_span(row), (self._process, row["thread_id"]))
        for row in self._of("hip_api"):
            thread, correlation = (self._process, row["thread_id"]), row["correlation_id"]["internal"]
            self._translation.host("hip_runtime", self._operation(row), *_span(row), thread, correlation=correlation)
        names = {entry["kernel_id"]: _kernel_name(entry) for entry in self._tool["kernel_symbols"] if entry}
        queues: dict[Any, int] = {}
        for row in self._of("kernel_dispatch"):
            info = row["dispatch_info"]
            stream = queues.setdefault((info["agent_id"]["handle"], info["queue_id"]["handle"]), len(queues))
            args = self._args(row, info["agent_id"], stream)
            self._translation.operation("kernel", names.get(info["kernel_id"], ""), *_span(row), args)
        for row in self._of("memory_copies", "memory_copy"):
            on = next((end for end in (row["dst_agent_id"], row["src_agent_id"]) if end["handle"] in self._gpus), None)
            if on is not None:
                args = self._args(row, on, -1, num_bytes=row.get("bytes", -1))
                self._translation.operation("gpu_memcpy", _copy_name(self._operation(row)), *_span(row), args)
        return self._translation.trace(devices=self._devices)

    def _of(self, *kinds: str) -> list[Mapping[str, Any]]:
        """Return the records of a kind, under any of the names that rocprofv3's versions use."""
        return next((self._records[kind] for kind in kinds if self._records.get(kind)), [])

    def _operation(self, row: Mapping[str, Any]) -> str:
        return str(self._kinds[row["kind"]]["operations"][row["operation"]])

    def _args(self, row: Mapping[str, Any], agent: Mapping[str, Any], stream: int, num_bytes: int = -1) -> Args:
        correlation = row["correlation_id"]["internal"]
        stream = len(self._gpus) + (1 << 10) if stream < 0 else stream
        return Args(
            device=self._gpus.get(agent["handle"], 0), stream=stream, correlation=correlation, num_bytes=num_bytes
        )


def _span(row: Mapping[str, Any]) -> tuple[int, int]:
    return int(row["start_timestamp"]), int(row["end_timestamp"])


def _kernel_name(symbol: Mapping[str, Any]) -> str:
    names = (symbol.get(key) for key in ("formatted_kernel_name", "demangled_kernel_name", "kernel_name"))
    return next((str(name) for name in names if name), "")


def _copy_name(direction: str) -> str:
    return f"Memcpy {next((short for long, short in _DIRECTIONS.items() if direction.endswith(long)), direction)}"


def read_rocprof_csv(path: Path) -> Trace:
    """Read the trace in CSV tables: the table of kernels, and the tables whose file names begin with the same prefix.

    Raises:
        TraceError: A table cannot be read, or there are no steps.
    """
    translation = Translation(WHAT, MARK)
    numbers: dict[tuple[str, str], int] = {}
    tables: dict[str, Callable[[Mapping[str, str]], None]] = {
        "marker_api_trace": lambda row: translation.annotation(row["Function"], *_times(row), _thread(row)),
        "hip_api_trace": lambda row: translation.host(
            "hip_runtime", row["Function"], *_times(row), _thread(row), correlation=int(row["Correlation_Id"])
        ),
        "kernel_trace": lambda row: translation.operation(
            "kernel", row["Kernel_Name"], *_times(row), _place(row, row["Agent_Id"], row["Queue_Id"], numbers)
        ),
        "memory_copy_trace": lambda row: translation.operation(
            "gpu_memcpy", _copy_name(row["Direction"]), *_times(row), _place(row, _gpu(row), "copies", numbers)
        ),
    }
    beginning = path.name.removesuffix(KERNELS_CSV)
    for name, take in tables.items():
        beside = path.with_name(f"{beginning}_{name}.csv")
        with written_as(f"{WHAT} {VERSIONS}", f"look at {beside.name}"):
            for row in _table(beside):
                take(row)
    return translation.trace()


def _table(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a table; none if it was not recorded."""
    if path.exists():
        with path.open(newline="", errors="replace") as file:
            yield from csv.DictReader(file)


def _times(row: Mapping[str, str]) -> tuple[int, int]:
    return int(row["Start_Timestamp"]), int(row["End_Timestamp"])


def _thread(row: Mapping[str, str]) -> tuple[str, str]:
    return row["Process_Id"], row["Thread_Id"]


def _gpu(row: Mapping[str, str]) -> str:
    """Return the GPU agent of a copy: the source of a copy to the host, otherwise the destination."""
    ends = row["Source_Agent_Id"], row["Destination_Agent_Id"]
    return ends[0] if _copy_name(row["Direction"]).endswith("DtoH") else ends[1]


def _place(row: Mapping[str, str], agent: str, queue: str, numbers: dict[tuple[str, str], int]) -> Args:
    return Args(
        device=numbers.setdefault(("device", agent), sum(kind == "device" for kind, _ in numbers)),
        stream=numbers.setdefault((agent, queue), len(numbers)),
        correlation=int(row["Correlation_Id"]),
    )
