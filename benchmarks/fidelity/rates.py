"""Measures a training loop from inside its own process; what benchmarks/export_fidelity.py starts prints it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator


def report(steps: Iterator[int], *, warm_up_s: float, measure_s: float) -> None:
    """Runs an endless loop, and prints its rate after the warm-up as JSON.

    Args:
        steps: Runs one step at a time and gives its samples; epochs follow one another.
    """
    _run(steps, warm_up_s)
    samples, duration_s = _run(steps, measure_s)
    json.dump({"units_per_s": samples / duration_s, "duration_s": duration_s}, sys.stdout)
    sys.stdout.write("\n")


def _run(steps: Iterator[int], seconds: float) -> tuple[int, float]:
    began = time.perf_counter()
    samples = 0
    for count in steps:
        samples += count
        elapsed_s = time.perf_counter() - began
        if elapsed_s >= seconds:
            return samples, elapsed_s
    raise AssertionError("a training loop is endless")
