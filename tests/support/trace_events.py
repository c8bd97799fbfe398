"""Kineto events for tests, in microseconds as a trace has them."""

import json
from pathlib import Path
from typing import Any

from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.profiling.trace import Trace

Event = dict[str, Any]
MAIN, OTHER = 1, 2


def event(category: str, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "pid": 100,
        "tid": thread,
        "args": args,
    }


def step(number: int, start: float, end: float) -> Event:
    return event("user_annotation", f"ProfilerStep#{number}", start, end)


def operator(name: str, start: float, end: float, thread: int = MAIN) -> Event:
    return event("cpu_op", name, start, end, thread)


def note(name: str, start: float, end: float, thread: int = MAIN) -> Event:
    return event("user_annotation", name, start, end, thread)


def runtime(name: str, start: float, end: float, correlation: int = -1, thread: int = MAIN) -> Event:
    return event("cuda_runtime", name, start, end, thread, correlation=correlation)


def kernel(name: str, start: float, end: float, correlation: int = -1, device: int = 0, stream: int = 7) -> Event:
    return event("kernel", name, start, end, 1000 + stream, correlation=correlation, device=device, stream=stream)


def copy(name: str, start: float, end: float, correlation: int = -1, device: int = 0) -> Event:
    return event("gpu_memcpy", name, start, end, 1099, correlation=correlation, device=device, stream=99)


def allocation(
    time: float,
    allocated: int,
    reserved: int = 2048,
    *,
    device: int = 0,
    num_bytes: int = 1,
    address: int | str = 5,
) -> Event:
    """The totals of a device once it gave or took back a block; device -1 is the host."""
    totals = {"Total Allocated": allocated, "Total Reserved": reserved}
    args = {**totals, "Device Type": int(device >= 0), "Device Id": device, "Bytes": num_bytes, "Addr": address}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": time, "pid": 1, "tid": 1, "args": args}


def recomputed(name: str, start: float, end: float, thread: int = MAIN) -> Event:
    """An operator of the forward pass as it is recorded with gradients on."""
    return event("cpu_op", name, start, end, thread, **{"Sequence number": 7, "Fwd thread id": 0})


def launched(name: str, call: float, start: float, end: float, correlation: int, thread: int = MAIN) -> list[Event]:
    """A kernel and the call that launched it."""
    return [
        runtime("cudaLaunchKernel", call, call + 1, correlation, thread),
        kernel(name, start, end, correlation),
    ]


def write_trace(path: Path, events: list[Event], **top: Any) -> Path:
    path.write_text(json.dumps({**top, "traceEvents": events}))
    return path


def trace_of(directory: Path, events: list[Event], **top: Any) -> Trace:
    return read_trace(write_trace(directory / "trace.json", events, **top))
