"""The real traces: the one place that says where they lie."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("STEPTUNE_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")
NAMES = tuple(sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz")))

needs_traces = pytest.mark.skipif(
    not NAMES, reason=f"no real traces in {FOLDER}: they are not part of the repository; set STEPTUNE_TRACES"
)


def trace_file(name: str) -> Path:
    """A real trace, or a skip that says why."""
    path = FOLDER / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there: real traces are not part of the repository; set STEPTUNE_TRACES")
    return path


def expected_file(name: str) -> Path:
    """File of what other analysers say of a real trace."""
    return trace_file(name).with_name(f"{name}.expected.json")
