"""Time that a loader takes to make a sample, measured where batches are made: in its worker processes, if it has some.

Workers that are forked inherit the wrapper and the shared memory that they write to; workers that start anew are not
measured. The first batch of each process is left out, because it opens files and loads libraries.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

NUM_LOADERS, NUM_PROCESSES = 16, 128
_SUM = struct.Struct("qq")
"""Nanoseconds, and the number of samples that took them."""


class SampleTimes:
    """Sums of the times of samples, by loader and process: each sum has a single writer."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NUM_LOADERS * NUM_PROCESSES * _SUM.size)
        self._numbers: dict[int, int] = {}
        self._has_begun: set[int] = set()

    def expect(self, dataset: Any, number: int) -> None:
        """Measure the samples of a dataset from now on, for the loader with this number; processes that are forked
        later do so, too.
        """
        if number < NUM_LOADERS:
            self._numbers[id(dataset)] = number

    def fetching(self, original: Any) -> Callable[..., Any]:
        """Return a wrapper of a fetcher's method `fetch`."""

        def fetch(fetcher: Any, indices: Any) -> Any:
            began_ns = perf_counter_ns()
            batch = original(fetcher, indices)
            number = self._numbers.get(id(fetcher.dataset))
            if number is not None:
                self._add(number, perf_counter_ns() - began_ns, len(indices) if hasattr(indices, "__len__") else 1)
            return batch

        return fetch

    def _add(self, number: int, time_ns: int, num_samples: int) -> None:
        if number not in self._has_begun:
            self._has_begun.add(number)
            return
        worker = torch.utils.data.get_worker_info()
        process = NUM_PROCESSES - 1 if worker is None else worker.id
        if process < NUM_PROCESSES:
            offset = (number * NUM_PROCESSES + process) * _SUM.size
            before_ns, before = _SUM.unpack_from(self._memory, offset)
            _SUM.pack_into(self._memory, offset, before_ns + time_ns, before + num_samples)

    def sample_ns(self, number: int) -> int | None:
        """Return the mean time of a loader's samples; None if none was measured."""
        if number >= NUM_LOADERS:
            return None
        first = number * NUM_PROCESSES
        sums = [_SUM.unpack_from(self._memory, (first + n) * _SUM.size) for n in range(NUM_PROCESSES)]
        count = sum(samples for _, samples in sums)
        return sum(time_ns for time_ns, _ in sums) // count if count else None
