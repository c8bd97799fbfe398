"""Events of studies, as paginated lists or as a live stream. A client can resume the stream where it stopped."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated

import anyio
import msgspec
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from steptune.service.access.authentication import Access
from steptune.service.access.errors import AccessError
from steptune.service.access.principal import Principal
from steptune.service.api.answers import answer
from steptune.service.api.context import Services, StudyId, services
from steptune.service.api.openapi import COMMON, Responses, refuses, returns, unchanged
from steptune.service.api.ownership import check_study
from steptune.service.api.pagination import PageRequest, Paging
from steptune.service.api.problems import RefusalError
from steptune.service.api.security import Requires
from steptune.service.event_hub import EventHub, Subscription
from steptune.service.messages import Page
from steptune.service.queries import events as queries
from steptune.service.queries.events import OwnedEvent
from steptune.service.settings.scopes import Scope as AccessScope
from steptune.tuner.records import Event

KEEP_ALIVE_S = 15.0
SEND_TIMEOUT_S = 30.0
"""Maximum seconds for which a client may accept no data; then it counts as gone."""
RECHECK_S = 60.0
"""Maximum seconds for which a stream may outlive the token that opened it."""
_PAGE = 500
_MAX_NUMBER = (1 << 63) - 1
_NUMBER = re.compile(r"[0-9]{1,19}")

router = APIRouter(tags=["events"], responses=COMMON)
Reader = Annotated[Principal, Requires(AccessScope.READ)]
After = Annotated[
    int | None,
    Query(
        ge=0,
        le=_MAX_NUMBER,
        description="Only events with numbers above this one; the header Last-Event-ID takes precedence.",
    ),
]
LastEventId = Annotated[
    str | None, Header(description="Number of the last event that the client received; browsers send it automatically.")
]
STREAM = {
    "text/event-stream": {
        "schema": {
            "type": "string",
            "description": "Server-sent events: `id` is the event's number, `event` its kind, `data` an `Event`.",
        }
    }
}
_PAGES = returns(Page[Event], "Events, as a page or as a stream.")[200]
EVENTS: Responses = {200: {**_PAGES, "content": {**_PAGES["content"], **STREAM}}}
DESCRIPTION = (
    " With `Accept: text/event-stream`, events are streamed as they happen, each with its number as `id`. A "
    "client that lost its connection sends the last number as `Last-Event-ID` and misses nothing. Comments "
    "keep the connection alive. Without that media type, events are returned in pages."
)


@dataclass(frozen=True, kw_only=True)
class Followed:
    """Events that one stream sends: those after a given event, of one study or of all that the caller may see.

    Attributes:
        owner_id: Owner of the studies; None for all owners.
        visible_to: Who may see the study, besides administrators; None for nobody.
    """

    study_id: str | None
    owner_id: str | None
    visible_to: str | None
    after: int


@router.get(
    "/studies/{study_id}/events",
    summary="Follow a study",
    description="All events of a study, from its beginning; the stream ends when the study has ended." + DESCRIPTION,
    responses={
        **EVENTS,
        204: {"description": "The study has ended, and the client has all of its events: do not reconnect."},
        **unchanged(),
        **refuses(404),
    },
)
def study_events(
    request: Request,
    principal: Reader,
    study_id: StudyId,
    page: Paging,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Response:
    service = services(request)
    visible_to = check_study(service.engine, study_id, principal)
    known = _last_known(after, last_event_id)
    if not _wants_stream(request):
        return _event_page(request, service, page, study_id=study_id, owner_id=None, after=known or 0)
    if known is not None and queries.is_over(service.engine, study_id, known):
        return Response(status_code=204)
    return _stream(
        request, service, principal, Followed(study_id=study_id, owner_id=None, visible_to=visible_to, after=known or 0)
    )


@router.get(
    "/events",
    summary="Follow everything",
    description="Events of all studies that you may see. A stream begins with the next event, unless `after` or "
    "`Last-Event-ID` is given." + DESCRIPTION,
    responses={
        **EVENTS,
        **unchanged(),
    },
)
def all_events(
    request: Request,
    principal: Reader,
    page: Paging,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Response:
    service = services(request)
    owner_id = None if principal.is_admin else principal.user_id
    known = _last_known(after, last_event_id)
    if not _wants_stream(request):
        return _event_page(request, service, page, study_id=None, owner_id=owner_id, after=known or 0)
    begin = _NOW if known is None else known
    return _stream(
        request, service, principal, Followed(study_id=None, owner_id=owner_id, visible_to=owner_id, after=begin)
    )


_NOW = -1


def _last_known(after: int | None, last_event_id: str | None) -> int | None:
    if last_event_id is None:
        return after
    if not _NUMBER.fullmatch(last_event_id) or int(last_event_id) > _MAX_NUMBER:
        raise RefusalError(
            400, "invalid-last-event-id", f"Last-Event-ID must be the number of an event, got {last_event_id[:50]!r}"
        )
    return int(last_event_id)


def _wants_stream(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def _event_page(
    request: Request, service: Services, page: PageRequest, *, study_id: str | None, owner_id: str | None, after: int
) -> Response:
    begin = after if page.after_number is None else page.after_number
    until = queries.horizon(service.engine).final if study_id is None else None  # those of one study come in order
    found = queries.events_after(
        service.engine, begin, page.limit + 1, until=until, study_id=study_id, owner_id=owner_id
    )
    return answer(request, page.cut(found, lambda event: event.number).each(lambda event: msgspec.Raw(event.json)))


def _stream(request: Request, service: Services, principal: Principal, followed: Followed) -> Response:
    slots = [(service.streams.of_user, principal.user_id)]
    slots += [] if followed.study_id is None else [(service.streams.of_study, followed.study_id)]
    return EventStream(request, service, followed, service.streams.taken([*slots, (service.streams.of_all, "")]))


class EventStream(StreamingResponse):
    """Streaming response: first the events in the database, then those that the hub finds."""

    def __init__(
        self, request: Request, service: Services, followed: Followed, leave: Callable[[], None] = lambda: None
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._lines(), media_type="text/event-stream", headers=headers)
        self._request = request
        self._hub: EventHub = service.events
        self._engine = service.engine
        self._gauge = service.metrics.event_streams
        self._followed = followed
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: object) -> None:
            with anyio.fail_after(SEND_TIMEOUT_S):
                await send(message)  # type: ignore[arg-type]

        try:
            await super().__call__(scope, receive, send_in_time)
        except* TimeoutError:
            pass  # the server closes the connection of a response that is not complete
        finally:
            self._leave()

    async def _lines(self) -> AsyncIterator[bytes]:
        followed = self._followed
        subscription = await self._hub.subscribe(followed.study_id, followed.owner_id)
        self._gauge.inc()
        try:
            last = subscription.begins_after if followed.after == _NOW else followed.after
            # The number is for a client that loses its connection before the first event.
            yield b"id: %d\nretry: 2000\n\n" % last
            async for event in self._missed(last, subscription.begins_after):
                yield _lines_of(event)
            async for line in self._live(subscription, max(last, subscription.begins_after)):
                yield line
        finally:
            self._hub.unsubscribe(subscription)
            self._gauge.dec()

    async def _missed(self, last: int, until: int) -> AsyncIterator[OwnedEvent]:
        """Yield events that are already in the database."""
        study_id, owner_id = self._followed.study_id, self._followed.owner_id
        full = last < until
        while full and not self._hub.closed:
            found = await self._hub.in_thread(
                queries.events_after, self._engine, last, _PAGE, until=until, study_id=study_id, owner_id=owner_id
            )
            for event in found:
                last = event.number
                yield event
            full = len(found) == _PAGE

    async def _live(self, subscription: Subscription, last: int) -> AsyncIterator[bytes]:
        """Yield new events as they arrive, until the stream must end."""
        checked_s = time.monotonic()
        while True:
            while subscription.waiting:
                event = subscription.waiting.popleft()
                if event.number > last:
                    yield _lines_of(event)
            if subscription.ended or subscription.too_slow:
                return
            if time.monotonic() - checked_s >= RECHECK_S:
                if not await self._may_still_read():
                    return
                checked_s = time.monotonic()
                continue  # something may have come meanwhile
            subscription.changed.clear()
            try:
                await asyncio.wait_for(subscription.changed.wait(), KEEP_ALIVE_S)
            except TimeoutError:
                yield b": still here\n\n"

    async def _may_still_read(self) -> bool:
        """Say whether the token or session that opened the stream still permits reading everything that the stream
        sends.
        """
        access: Access = self._request.app.state.access
        try:
            principal = await self._hub.in_thread(access.authenticate, self._request, None)
        except AccessError:
            return False
        return AccessScope.READ in principal.scopes and principal.may_see(self._followed.visible_to)


def _lines_of(event: OwnedEvent) -> bytes:
    kind = event.kind.replace("\n", " ").replace("\r", " ")
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.number, kind.encode(), event.json)
