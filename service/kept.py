"""In-process LRU cache with a maximum size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Cached values by key; several threads may use the cache."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._size = 0
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Cache a value, replacing one with the same key; a value larger than the whole cache is not kept."""
        with self._lock:
            self._drop(key)
            if size > self._max_size:
                return
            self._values[key] = value, size
            self._size += size
            while self._size > self._max_size:
                self._drop(next(iter(self._values)))

    def get_or_make(self, key: Hashable, make: Callable[[], Value], size: int) -> Value:
        """Return a cached value, or make and cache it. Two threads that ask at the same time may both make it."""
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found, size)
        return found

    def _drop(self, key: Hashable) -> None:
        if key in self._values:
            self._size -= self._values.pop(key)[1]
