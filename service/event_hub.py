"""Delivery of new events to all streams of a process: one poll of the database serves all clients.

Events have numbers that grow, and streams send them in that order, so that a client that comes back with the last
number it saw misses nothing. A transaction that took a number may commit after one that took the next: so streams send
what lies below the horizon (`steptune.service.queries.events.horizon`), where no further event can appear.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from sqlalchemy import Engine

from steptune.service.logs import LOGGER
from steptune.service.queries import events as queries
from steptune.service.queries.events import OwnedEvent
from steptune.tuner.errors import StoreError

MAX_WAITING = 2_000
"""Maximum events that wait for one client. A slower client is disconnected, and resumes where it was."""
_PAGE = 1_000
_NUM_THREADS = 4
_log = logging.getLogger(LOGGER)
Answer = TypeVar("Answer")


@dataclass(eq=False)
class Subscription:
    """One client's subscription. The hub fills `waiting`; `changed` signals new content.

    Attributes:
        study_id: The single study to follow; None for all that `owner_id` may see.
        owner_id: Owner of the studies; None for all owners.
        begins_after: Events up to this number are in the database already, for the client to read there.
        ends_after: Number that no event of the study exceeds, once the study has ended; None before.
        ended: Whether no more events will come: the study has ended, or the server is stopping.
        too_slow: Whether more than `MAX_WAITING` events were waiting for the client.
    """

    study_id: str | None
    owner_id: str | None
    begins_after: int = 0
    ends_after: int | None = None
    waiting: deque[OwnedEvent] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    too_slow: bool = False

    def wants(self, event: OwnedEvent) -> bool:
        if self.study_id is not None:
            return event.study_id == self.study_id
        return self.owner_id is None or event.owner_id == self.owner_id

    def put(self, event: OwnedEvent) -> None:
        if len(self.waiting) >= MAX_WAITING:
            self.too_slow = True
        else:
            self.waiting.append(event)
        self.changed.set()

    def end(self) -> None:
        self.ended = True
        self.changed.set()


class EventHub:
    """Hub that polls the database for new events while at least one stream is open. Only the queries run outside the
    event loop's thread.
    """

    def __init__(self, engine: Engine, poll_s: float) -> None:
        self._engine = engine
        self._poll_s = poll_s
        self._subscriptions: set[Subscription] = set()
        self._last = 0
        """Number of the last event that was delivered to the subscriptions."""
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._limiter: CapacityLimiter | None = None
        self.closed = False

    async def subscribe(self, study_id: str | None, owner_id: str | None) -> Subscription:
        """Subscribe to events; end the subscription with `unsubscribe`.

        Raises:
            StoreError: The database cannot be read.
        """
        subscription = Subscription(study_id=study_id, owner_id=owner_id)
        async with self._starting:
            if self._task is None or self._task.done():
                self._last = (await self.in_thread(queries.horizon, self._engine)).final
                self._task = asyncio.create_task(self._run())
            subscription.begins_after = self._last
            self._subscriptions.add(subscription)
        if self.closed:
            subscription.end()
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End all streams, and every stream that begins from now on; the clients reconnect to another process."""
        self.closed = True
        for subscription in self._subscriptions:
            subscription.end()

    async def stop(self) -> None:
        """Stop the hub."""
        self.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def in_thread(self, function: Callable[..., Answer], *arguments: object, **options: object) -> Answer:
        """Run a query in a thread. Streams share few threads, so that requests always find a free one."""
        if self._limiter is None:
            self._limiter = CapacityLimiter(_NUM_THREADS)
        return await to_thread.run_sync(functools.partial(function, *arguments, **options), limiter=self._limiter)

    async def _run(self) -> None:
        """Poll the database until no stream follows any more."""
        while self._subscriptions:
            try:
                await self._look()
            except StoreError:
                _log.warning("events cannot be read", exc_info=True)
            await asyncio.sleep(self._poll_s)

    async def _look(self) -> None:
        followed = [s.study_id for s in self._subscriptions if s.study_id is not None]
        # First who has ended, then what happened: what a study did before its end is among the events.
        over = await self.in_thread(queries.ended_studies, self._engine, followed)
        horizon = await self.in_thread(queries.horizon, self._engine)
        for subscription in self._subscriptions:
            if subscription.study_id in over and subscription.ends_after is None:
                subscription.ends_after = horizon.newest
        await self._tell_until(horizon.final)
        for subscription in self._subscriptions:
            if subscription.ends_after is not None and subscription.ends_after <= self._last:
                subscription.end()

    async def _tell_until(self, final: int) -> None:
        while self._last < final:
            found = await self.in_thread(queries.events_after, self._engine, self._last, _PAGE, until=final)
            self._last = found[-1].number if len(found) == _PAGE else final
            self._deliver(found)

    def _deliver(self, events: Iterable[OwnedEvent]) -> None:
        for event in events:
            for subscription in self._subscriptions:
                if subscription.wants(event):
                    subscription.put(event)
