"""Limit of event streams that one process keeps open: of all, of one user, of one study."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from steptune.service.access.concurrency import Concurrency
from steptune.service.access.errors import TooManyRequestsError
from steptune.service.settings import Settings


class StreamLimits:
    """The counters of one process."""

    def __init__(self, settings: Settings) -> None:
        self.of_all = Concurrency("event streams", settings.max_event_streams, "STEPTUNE_MAX_EVENT_STREAMS")
        self.of_user = Concurrency(
            "event streams of one user", settings.max_user_event_streams, "STEPTUNE_MAX_USER_EVENT_STREAMS"
        )
        self.of_study = Concurrency(
            "event streams of one study", settings.max_study_event_streams, "STEPTUNE_MAX_STUDY_EVENT_STREAMS"
        )

    def taken(self, slots: Sequence[tuple[Concurrency, str]]) -> Callable[[], None]:
        """Take one of each, all or none; what is returned gives them back.

        Raises:
            TooManyRequestsError: Of one there is none left; it says which.
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
