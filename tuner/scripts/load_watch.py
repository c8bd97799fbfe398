"""Load of other programs on the host's cores while a script runs."""

from __future__ import annotations

import threading
import time

from steptune.tuner.trials.contention import CpuReading, foreign_share, read_cpu

LOAD_READ_EVERY_S = 0.5


class LoadWatch:
    """CPU use of other programs, read at intervals while a trial runs."""

    def __init__(self) -> None:
        self._readings: list[CpuReading] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> LoadWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def share(self, begin_ns: int, end_ns: int) -> float:
        """Return the share of the cores that other programs used, between the last reading before a window and the
        first one after it.
        """
        before = [reading for reading in self._readings if reading.at_s * 1e9 <= begin_ns]
        after = [reading for reading in self._readings if reading.at_s * 1e9 >= end_ns]
        return foreign_share(before[-1], after[0]) if before and after else 0.0

    def _watch(self) -> None:
        while True:
            reading = read_cpu(time.perf_counter())
            if reading is not None:
                self._readings.append(reading)
            if self._ended.wait(LOAD_READ_EVERY_S):
                return
