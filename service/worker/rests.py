"""Owners whose studies a worker leaves alone for a while, after one that the worker or its environment failed.

User code can bring that about: it may kill its own trial server. So the studies of its user wait, longer each time in a
row, and nobody else's; only where studies of several users fail one after the other does the machine ail, and the
worker takes nothing, so that this does not go through the whole queue.
"""

from __future__ import annotations

import math

from steptune.service.worker.clock import now_s

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0


class Rests:
    """Pauses of one worker."""

    def __init__(self) -> None:
        self._pauses: dict[str | None, tuple[float, float]] = {}
        """Pauses by owner: the last one in seconds, and when it ends."""
        self._failed: set[str | None] = set()
        """Owners of the studies that failed since the last one that did not."""
        self._until_s = 0.0

    def learn(self, owner_id: str | None, *, failed: bool) -> None:
        """A study has been given back."""
        if not failed:
            self._pauses.pop(owner_id, None)
            self._failed.clear()
            return
        pause_s, _ = self._pauses.get(owner_id, (0.0, 0.0))
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s or FIRST_PAUSE_S)
        self._pauses[owner_id] = pause_s, now_s() + pause_s
        self._failed.add(owner_id)
        if len(self._failed) > 1:
            self._until_s = now_s() + pause_s

    def owners(self) -> frozenset[str | None]:
        """Users whose studies wait now."""
        now = now_s()
        return frozenset(owner_id for owner_id, (_, until_s) in self._pauses.items() if until_s > now)

    def next_s(self) -> float:
        """Seconds until the first of those may go on; infinity where none waits."""
        now = now_s()
        return min((until_s - now for _, until_s in self._pauses.values() if until_s > now), default=math.inf)

    def left_s(self) -> float:
        """Time for which the worker still takes nothing."""
        return max(0.0, self._until_s - now_s())
