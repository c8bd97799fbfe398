"""Measures a training loop from inside its own process; what benchmarks/export_fidelity.py starts prints it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator


class Meter:
    """Rate of a loop after its warm-up."""

    def __init__(self, *, warm_up_s: float, measure_s: float) -> None:
        self._warm_up_s, self._measure_s = warm_up_s, measure_s
        self._began, self._is_warm, self._samples = time.perf_counter(), False, 0

    def step(self, samples: int) -> bool:
        """Count a step; True after the last one, whose rate is then printed as JSON."""
        self._samples += samples
        elapsed_s = time.perf_counter() - self._began
        if elapsed_s < (self._measure_s if self._is_warm else self._warm_up_s):
            return False
        if self._is_warm:
            json.dump({"units_per_s": self._samples / elapsed_s, "duration_s": elapsed_s}, sys.stdout)
            sys.stdout.write("\n")
            return True
        self._began, self._is_warm, self._samples = time.perf_counter(), True, 0
        return False


def report(steps: Iterator[int], *, warm_up_s: float, measure_s: float) -> None:
    """Runs an endless loop, and prints its rate after the warm-up as JSON.

    Args:
        steps: Runs one step at a time and gives its samples; epochs follow one another.
    """
    meter = Meter(warm_up_s=warm_up_s, measure_s=measure_s)
    for count in steps:
        if meter.step(count):
            return
    raise AssertionError("a training loop is endless")
