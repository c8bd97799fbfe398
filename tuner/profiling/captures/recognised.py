"""Recognition of the profiler that wrote a file, by its first bytes, and refusal of unsupported files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from steptune.tuner.profiling.captures import jax, rocprof
from steptune.tuner.profiling.captures.jax import read_jax
from steptune.tuner.profiling.captures.rocprof import KERNELS_CSV, read_rocprof_csv, read_rocprof_json
from steptune.tuner.profiling.captures.whole_files import beginning
from steptune.tuner.profiling.trace import Trace, TraceError

_SQLITE = b"SQLite format 3\x00"
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
OTHERS = {
    ".nsys-rep": (
        "a report of Nsight Systems",
        "export it with `nsys export --type sqlite`, and name the .sqlite file",
    ),
    ".qdrep": ("a report of Nsight Systems", "export it with `nsys export --type sqlite`, and name the .sqlite file"),
    ".ncu-rep": (
        "a report of Nsight Compute, which profiles single kernels",
        "record steps with torch.profiler or nsys",
    ),
    ".pftrace": (
        "a trace in Perfetto's own format",
        "write JSON instead: `rocprofv3 --output-format json`, or torch.profiler's export_chrome_trace",
    ),
    ".xplane.pb": ("a profile of JAX in XPlane format", "name the .trace.json.gz in the same folder"),
    ".pickle": (
        "a pickle (possibly a memory snapshot; Steptune does not open pickles)",
        "record steps with torch.profiler",
    ),
    ".pt": ("a checkpoint", "record steps with torch.profiler"),
    ".csv": ("a table", f"of rocprofv3's tables, name the one that ends in {KERNELS_CSV}"),
}
"""Unsupported file types by suffix: a description of each, and the remedy."""


def translator(path: Path) -> Callable[[Path], Trace] | None:
    """Return the reader for another profiler's capture; None if the file may be a trace of torch.profiler.

    Raises:
        TraceError: The file is known to be no trace.
    """
    start = beginning(path)
    if start.startswith(_SQLITE):
        from steptune.tuner.profiling.captures.nsight import read_nsight

        return read_nsight
    if path.name.endswith(KERNELS_CSV):
        return read_rocprof_csv
    if start.startswith(_ZIP):
        raise TraceError("it is an archive: name it to `steptune analyze`, or unpack it")
    for suffix, (what, remedy) in OTHERS.items():
        if path.name.endswith(suffix):
            raise TraceError(f"it is {what}, not a trace of steps: {remedy}")
    if rocprof.BEGINNING in start:
        return read_rocprof_json
    return read_jax if jax.BEGINNING.search(start) else None
