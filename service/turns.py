"""Turns of threads, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """Lets so many threads in at the same time. Who leaves hands its place to who has waited longest: Python's own
    semaphore lets whoever comes at the right moment pass those who wait.

    Args:
        places: How many threads.
    """

    def __init__(self, places: int) -> None:
        self._lock = threading.Lock()
        self._free = places
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1
