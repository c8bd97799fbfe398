"""Time limit for the head of a request: without it, a client could hold many connections open.

Uvicorn limits the time between two requests of a connection, but not that of a head: a byte per minute keeps it open.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_TIMEOUT_S = 20.0
_BODY = (
    b'{"type":"urn:steptune:problem:request-timeout","title":"Request Timeout","status":408,"code":"request-timeout",'
    b'"detail":"the head of the request did not arrive within %d seconds: send it at once"}'
)
_ANSWER = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/problem+json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s"
)


class PromptHeads(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Uvicorn's protocol with a time limit for each request's head. The time counts from the opening of the connection
    or, for later requests, from the head's first byte.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._head_timer is None and (before is None or before.response_complete):
            self._wait_for_head()
        super().data_received(data)
        if self.cycle is not before:
            self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._refuse)

    def _cancel(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self) -> None:
        self._head_timer = None
        body = _BODY % round(self.head_timeout_s)
        self.transport.write(_ANSWER % (len(body), body))
        self.transport.close()
