"""Order in which a worker requests hosts for studies that could not get them from its cluster: studies that can run go
first.
"""

from __future__ import annotations

from steptune.service.worker.clock import now_s

TURN_S = 60.0
"""Seconds for which a study whose hosts were not available lets other waiting studies go first."""
PAUSE_S = 5.0
"""Seconds between two requests for the same study's hosts."""


class Waits:
    """Studies for which one worker requests hosts, with the time of the last request."""

    def __init__(self) -> None:
        self._tried_s: dict[str, float] = {}
        """Time of the last request for a study's hosts, by study; the least recent first."""

    def add(self, study_id: str) -> None:
        """Add a study whose hosts were not available."""
        self.forget(study_id)
        self._tried_s[study_id] = now_s()

    def forget(self, study_id: str) -> None:
        """Forget a study that no longer waits."""
        self._tried_s.pop(study_id, None)

    @property
    def studies(self) -> frozenset[str]:
        return frozenset(self._tried_s)

    @property
    def recent(self) -> frozenset[str]:
        """Return the studies for which hosts were requested within the last `TURN_S` seconds."""
        return frozenset(study_id for study_id, tried_s in self._tried_s.items() if now_s() < tried_s + TURN_S)

    @property
    def due(self) -> list[str]:
        """Return the studies for which to request hosts again if no other study can run, the one with the oldest
        request first.
        """
        return [study_id for study_id, tried_s in self._tried_s.items() if now_s() >= tried_s + PAUSE_S]
