"""Profiles of JAX: `plugins/profile/RUN/HOST.trace.json.gz`, as `jax.profiler.trace` writes it.

The file is Chrome's JSON with a process for every device ("/device:GPU:0", "/device:TPU:0") and one for the host
("/host:CPU"). On a GPU the threads of a device are its streams ("Stream #13(Compute)"), and `correlation_id` links an
operation to the call that launched it; on a TPU they are lines of operations ("XLA Ops"). Other lines of a device sum
these up ("Steps", "XLA Modules"; on a GPU "XLA Ops", too), and would count them twice. A step is what
`jax.profiler.StepTraceAnnotation` marks (an event of the host with `step_num`), else what the line "Steps" has. The
profiler keeps at most a million events in this file, and drops the others silently.

Sources: "Profiling computation" (JAX documentation); in openxla/xla and openxla/xprof `trace_events_to_json.cc`,
`xplane_schema.cc` (names of lines), `derived_timeline.h` (those of a GPU that are derived from its streams), and
`xplane_to_trace_events.cc` (which events are left out: the latest).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steptune.tuner.profiling.captures.translation import Translation, written_as
from steptune.tuner.profiling.captures.whole_files import json_of
from steptune.tuner.profiling.events import Args
from steptune.tuner.profiling.trace import Trace

WHAT = "a profile of JAX"
MARK = 'Mark them: `with jax.profiler.StepTraceAnnotation("train", step_num=n):` around each'
BEGINNING = re.compile(rb'"name"\s*:\s*"/(device:(GPU|TPU):|host:CPU)')
_DEVICE = re.compile(r"^/device:(GPU|TPU):(\d+)")
_STREAM = re.compile(r"^Stream #(\d+)")
_COPY = re.compile(r"^Memcpy([HDP])(?:to|2)([HDP])$", re.IGNORECASE)
_LINES = {"XLA Ops": 0, "Async XLA Ops": 1}
"""Names of a TPU's trace lines that hold operations, with the stream number for each."""
STEPS = "Steps"


def read_jax(path: Path) -> Trace:
    """Read the trace in a JAX profile.

    Raises:
        TraceError: The profile cannot be read, or has no steps.
    """
    with written_as(WHAT, "record the steps again with `jax.profiler.trace`"):
        return _trace_of(json_of(path))


def _trace_of(profile: Any) -> Trace:
    rows = [row for row in profile.get("traceEvents", ()) if isinstance(row, dict)]
    processes, threads = _named(rows, "process_name"), _named(rows, "thread_name")
    translation = Translation(WHAT, MARK)
    summed_up = []
    for row in rows:
        if row.get("ph") != "X" or not isinstance(row.get("ts"), int | float):
            continue
        device = _DEVICE.match(processes.get((row.get("pid"), None), ""))
        line = threads.get((row.get("pid"), row.get("tid")), "")
        if device is None:
            _take_host(translation, row)
        elif line == STEPS:
            summed_up.append(row)
        else:
            _take_device(translation, row, int(device[2]), line, is_tpu=device[1] == "TPU")
    if not any("step_num" in _args(row) for row in rows):
        for row in _of_one_device(summed_up):
            translation.annotation(f"step {row.get('name')}", *_times(row), (STEPS, row["pid"]), step=0)
    names = {
        int(found[2]): name
        for (_, thread), name in processes.items()
        if thread is None and (found := _DEVICE.match(name))
    }
    return translation.trace(devices=[{"id": number, "name": names[number]} for number in sorted(names)])


def _of_one_device(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (row for row in rows if row["pid"] == min(row["pid"] for row in rows))


def _named(rows: list[dict[str, Any]], what: str) -> dict[tuple[Any, Any], str]:
    """Return the names of processes or of threads, by process id and thread id (None for a process)."""
    return {
        (row.get("pid"), row.get("tid") if what == "thread_name" else None): str(_args(row).get("name", ""))
        for row in rows
        if row.get("ph") == "M" and row.get("name") == what
    }


def _args(row: Mapping[str, Any]) -> Mapping[str, Any]:
    args = row.get("args")
    return args if isinstance(args, dict) else {}


def _times(row: Mapping[str, Any]) -> tuple[int, int]:
    start = round(row["ts"] * 1000)
    return start, start + max(0, round((row.get("dur") or 0) * 1000))


def _whole(value: Any) -> int:
    """Convert a number, possibly stored as text, to an integer; -1 if the value is no number."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1


def _take_host(translation: Translation, row: Mapping[str, Any]) -> None:
    name, args = str(row.get("name", "")), _args(row)
    thread, times = (row.get("pid", 0), row.get("tid", 0)), _times(row)
    correlation = _whole(args.get("correlation_id"))
    if "step_num" in args:
        translation.annotation(name, *times, thread, step=_whole(args["step_num"]))
    elif correlation >= 0:
        translation.host("cuda_runtime", name, *times, thread, correlation=correlation)
    elif name.startswith("$"):
        translation.host("python_function", name, *times, thread)
    else:
        translation.host("cpu_op", name, *times, thread)


def _take_device(translation: Translation, row: Mapping[str, Any], device: int, line: str, *, is_tpu: bool) -> None:
    stream = _STREAM.match(line)
    if stream is None and not (is_tpu and line in _LINES):
        return
    name, args = str(row.get("name", "")), _args(row)
    copy = _COPY.match(name)
    kind = "gpu_memset" if name.lower().startswith("memset") else "gpu_memcpy" if copy else "kernel"
    if copy:
        name = f"Memcpy {copy[1]}to{copy[2]}"
    elif stream is None:
        # XLA calls its operations "all-reduce.1", libraries of kernels "all_reduce".
        name = name.replace("-", "_")
    translation.operation(
        kind,
        name,
        *_times(row),
        Args(
            device=device,
            stream=int(stream[1]) if stream else _LINES[line],
            correlation=_whole(args.get("correlation_id")),
        ),
    )
