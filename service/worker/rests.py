"""Pauses of a worker after failures of the worker or its environment: for a while, it takes no studies of the affected
owners.

User code can cause that: it may kill its own trial server. So only the studies of its user wait, longer each time in a
row; if studies of several users fail one after the other, the machine is faulty, and the worker takes nothing, so that
not the whole queue fails.
"""

from __future__ import annotations

import math

from steptune.service.worker.clock import now_s

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0


class Rests:
    """Pauses of one worker, by owner of studies."""

    def __init__(self) -> None:
        self._pauses: dict[str | None, tuple[float, float]] = {}
        """Pauses by owner: the length of the last one in seconds, and the time at which it ends."""
        self._failed: set[str | None] = set()
        """Owners of the studies that failed since the last success."""
        self._until_s = 0.0

    def learn(self, owner_id: str | None, *, failed: bool) -> None:
        """Record whether a study that was released ended in a failure of the worker or its environment."""
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
        """Return the owners whose studies must wait now."""
        now = now_s()
        return frozenset(owner_id for owner_id, (_, until_s) in self._pauses.items() if until_s > now)

    def next_s(self) -> float:
        """Return the seconds until the first of the owners' pauses ends; infinity if no owner has a pause."""
        now = now_s()
        return min((until_s - now for _, until_s in self._pauses.values() if until_s > now), default=math.inf)

    def left_s(self) -> float:
        """Return the seconds left in which the worker takes no study of any owner."""
        return max(0.0, self._until_s - now_s())
