"""Activity of the processes that make batches: computing, or waiting.

A loader that keeps the model waiting is slow for one of two reasons, and the remedies differ. Where its
processes compute all the time (or queue for a core), the samples are expensive: more workers, cheaper
transforms, a cache of decoded samples. Where they sleep, they wait for storage or a network.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from steptune.tuner.records import InputActivity


class InputMeter:
    """Meter that measures, over one window, the activity of the processes that make a loader's batches.

    Args:
        iterator: Iterator of the loader. Its workers make the batches; without workers, the calling thread does, in
            `next`.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._workers = [worker.pid for worker in getattr(iterator, "_workers", ()) if worker.pid]
        self._next_ns = 0
        self._next_cpu_ns = 0
        self._began_ns = time.perf_counter_ns()
        self._before = self._read()

    def next(self, draw: Any) -> Any:
        """Draw a batch, and add the wall time and the CPU time of the draw to the window's sums."""
        start, cpu = time.perf_counter_ns(), time.thread_time_ns()
        batch = draw()
        self._next_cpu_ns += time.thread_time_ns() - cpu
        self._next_ns += time.perf_counter_ns() - start
        return batch

    def finish(self) -> InputActivity:
        elapsed_ns = max(1, time.perf_counter_ns() - self._began_ns)
        after = self._read()
        runnable_ns, read_bytes = (b - a for a, b in zip(self._before, after, strict=True))
        if self._workers:
            share = runnable_ns / (elapsed_ns * len(self._workers))
        else:
            share = self._next_cpu_ns / max(1, self._next_ns)
        return InputActivity(
            num_workers=len(self._workers),
            wait_ns=self._next_ns,
            runnable_share=min(1.0, share),
            read_bytes_per_s=max(0, read_bytes) * 1e9 / elapsed_ns,
        )

    def _read(self) -> tuple[int, int]:
        """Return two sums over all processes that make batches: the nanoseconds in which they computed or queued for a
        core, and the bytes that they read from storage.
        """
        runnable_ns = read_bytes = 0
        for pid in self._workers or [psutil.Process().pid]:
            # A worker that has ended, or a system that does not tell, adds nothing.
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                process = psutil.Process(pid)
                times = process.cpu_times()
                runnable_ns += int((times.user + times.system) * 1e9) + _queued_ns(pid)
                read_bytes += process.io_counters().read_bytes
        return runnable_ns, read_bytes


def _queued_ns(pid: int) -> int:
    """Return for how many nanoseconds a process was ready to run but had no core."""
    path = Path(f"/proc/{pid}/schedstat")
    return int(path.read_text(encoding="ascii").split()[1]) if path.exists() else 0
