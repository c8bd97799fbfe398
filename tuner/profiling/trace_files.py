"""Trace files, given as paths of files, folders or archives, or as patterns."""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from steptune.tuner.profiling.captures import rocprof
from steptune.tuner.profiling.captures.archive import unpacked
from steptune.tuner.profiling.captures.rocprof import KERNELS_CSV
from steptune.tuner.profiling.reader import HEAD
from steptune.tuner.profiling.trace import TraceError

SUFFIXES = (".json", ".json.gz")
OTHER_SUFFIXES = (".sqlite", KERNELS_CSV)
"""Suffixes of other profilers' files: exports of Nsight Systems and tables of rocprofv3."""
PROFILES_OF_JAX = Path("plugins", "profile")
BEGINNING_BYTES = 1 << 20
"""Number of bytes read to recognise a trace. Kineto writes devices and ranks, which take a few kilobytes, before the
events.
"""


def find_traces(names: Sequence[str | Path]) -> list[Path]:
    """Return the files that names refer to, each once, in the order of the names.

    Raises:
        TraceError: A name refers to no file.
    """
    found: dict[Path, Path] = {}
    for name in names:
        for path in _files(str(name)):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _files(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        return _inside(path)
    if path.exists():
        return _named(path)
    if glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207  (takes absolute patterns)
        files = [Path(match) for match in matches if Path(match).is_file()]
        if not files:
            raise TraceError(f"{name} matches no file: give the traces of a run, or their folder")
        return [file for match in files for file in _named(match)]
    raise TraceError(f"{name} does not exist: give a trace of torch.profiler ({' or '.join(SUFFIXES)}) or its folder")


def _named(path: Path) -> list[Path]:
    return _packed(path) if path.suffix.lower() == ".zip" else [path]


def _inside(folder: Path) -> list[Path]:
    """Return the files in a folder that look like traces: such folders hold other JSON files too."""
    runs = sorted(path for path in (folder / PROFILES_OF_JAX).glob("*") if path.is_dir())
    if runs:
        return _inside(runs[-1])
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(SUFFIXES))
    others = sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(OTHER_SUFFIXES))
    traces = [*(path for path in files if _looks_like_a_trace(path)), *others]
    if not traces:
        held = f"{len(files)} JSON files, but no trace" if files else f"no file that ends in {' or '.join(SUFFIXES)}"
        raise TraceError(f"{folder} holds {held}: give the folder in which torch.profiler wrote its traces")
    return traces


def _packed(archive: Path) -> list[Path]:
    files = unpacked(archive, (*SUFFIXES, *OTHER_SUFFIXES, ".csv"))
    traces = [path for path in files if path.name.endswith(OTHER_SUFFIXES) or _looks_like_a_trace(path)]
    if not traces:
        ends = ", ".join((*SUFFIXES, *OTHER_SUFFIXES))
        raise TraceError(
            f"{archive} holds no trace (looked for files that end in {ends}): pack the traces, one per rank"
        )
    return traces


def _looks_like_a_trace(path: Path) -> bool:
    """Say whether a file's beginning contains the list of events. The reader reports damage further on."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            start = file.read(BEGINNING_BYTES)
        return HEAD.search(start) is not None or rocprof.BEGINNING in start
    except (OSError, EOFError, zlib.error):
        return False
