"""Limits of simultaneous uses by a user, client or study, counted in the memory of one API process."""

from __future__ import annotations

import threading
from collections import Counter

from steptune.service.access.errors import TooManyRequestsError

RETRY_AFTER_S = 5


class Concurrency:
    """Limiter of the simultaneous uses of each key.

    Args:
        what: What is counted, with its owner: "event streams of one user".
        limit: Maximum number at once.
        setting: Name of the setting that changes the limit.
    """

    def __init__(self, what: str, limit: int, setting: str) -> None:
        self._what = what
        self._limit = limit
        self._setting = setting
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    def enter(self, key: str) -> None:
        """Count one more use of a key; `leave` ends the use.

        Raises:
            TooManyRequestsError: The limit is reached. Nothing was counted.
        """
        with self._lock:
            if self._open[key] < self._limit:
                self._open[key] += 1
                return
        raise TooManyRequestsError(
            f"the limit of {self._limit} concurrent {self._what} is reached ({self._setting}): end some, or wait",
            headers={"Retry-After": str(RETRY_AFTER_S)},
            members={"limit": self._limit, "setting": self._setting},
        )

    def leave(self, key: str) -> None:
        """End one use of a key. A key without uses takes no memory."""
        with self._lock:
            self._open[key] -= 1
            if self._open[key] <= 0:
                del self._open[key]

    def num_open(self, key: str) -> int:
        return self._open[key]
