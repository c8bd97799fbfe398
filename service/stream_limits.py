"""Limits of the event streams that one process keeps open: in total, per user, and per study."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from steptune.service.access.concurrency import Concurrency
from steptune.service.access.errors import TooManyRequestsError
from steptune.service.settings import Settings


class StreamLimits:
    """Counters of the open event streams of one process."""

    def __init__(self, settings: Settings) -> None:
        self.of_all = Concurrency("event streams", settings.max_event_streams, "STEPTUNE_MAX_EVENT_STREAMS")
        self.of_user = Concurrency(
            "event streams of one user", settings.max_user_event_streams, "STEPTUNE_MAX_USER_EVENT_STREAMS"
        )
        self.of_study = Concurrency(
            "event streams of one study", settings.max_study_event_streams, "STEPTUNE_MAX_STUDY_EVENT_STREAMS"
        )

    def taken(self, slots: Sequence[tuple[Concurrency, str]]) -> Callable[[], None]:
        """Take one slot of each counter, or none at all; return a function that releases the slots.

        Raises:
            TooManyRequestsError: A counter has none left; the message names it.
        """
        held: list[tuple[Concurrency, str]] = []

        def leave() -> None:
            for counter, key in held:
                counter.leave(key)

        for counter, key in slots:
            try:
                counter.enter(key)
            except TooManyRequestsError:
                leave()
                raise
            held.append((counter, key))
        return leave
