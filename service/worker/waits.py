"""Studies for which a worker's cluster had no hosts: others go first, and these take turns."""

from __future__ import annotations

from steptune.service.worker.clock import now_s

TURN_S = 60.0
"""A study that was asked for so long ago is asked for again, although another one waits in its place."""
PAUSE_S = 5.0
"""Interval at which a worker asks for the same study's hosts."""


class Waits:
    """Studies that one worker asks hosts for, and since when."""

    def __init__(self) -> None:
        self._tried_s: dict[str, float] = {}
        """Time of the last request for a study's hosts, by study; the one longest ago first."""

    def add(self, study_id: str) -> None:
        """Add a study whose hosts were not available."""
        self.forget(study_id)
        self._tried_s[study_id] = now_s()

    def forget(self, study_id: str) -> None:
        """Forget a study that waits no longer."""
        self._tried_s.pop(study_id, None)

    @property
    def studies(self) -> frozenset[str]:
        return frozenset(self._tried_s)

    @property
    def recent(self) -> frozenset[str]:
        """Studies that had their turn a short time ago."""
        return frozenset(study_id for study_id, tried_s in self._tried_s.items() if now_s() < tried_s + TURN_S)

    @property
    def due(self) -> list[str]:
        """Studies to ask for again where nothing else can run, the one longest ago first."""
        return [study_id for study_id, tried_s in self._tried_s.items() if now_s() >= tried_s + PAUSE_S]
