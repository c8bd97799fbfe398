"""Middleware around every request: its id, limits of its body, security headers, its log line, its metrics.

Plain ASGI, so that streams pass through unbuffered.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steptune.service.api.metrics import Metrics
from steptune.service.api.problems import MEDIA_TYPE, RefusalError, problem_bytes
from steptune.service.logs import LOGGER

REQUEST_ID = "steptune.request_id"
_random = random.Random()
_GIVEN_ID = re.compile(r"[A-Za-z0-9._\-]{1,64}")
UNMATCHED = "(none)"
PREFIX = "/api/v1"
UPLOADS = f"{PREFIX}/workloads"
BODY_GRACE_S = 30.0
SLOWEST_BYTES_PER_S = 16 << 10
_log = logging.getLogger(LOGGER)

SAFETY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Security headers of every response. Scripts are loaded only from the service's own origin. There are no CORS headers,
so that scripts of other origins cannot read responses.
"""
_SAFETY = [(name.lower().encode(), value.encode()) for name, value in SAFETY_HEADERS.items()]


class RequestMiddleware:
    """Middleware that gives each request an id, answers unhandled errors with a bare 500, and records the outcome.

    Args:
        base_path: Path below which a proxy serves the application, whether or not the proxy strips it.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, base_path: str = "") -> None:
        self._app = app
        self._metrics = metrics
        self._base_path = base_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._base_path:
            scope["root_path"] = self._base_path
        wanted = Headers(scope=scope).get("x-request-id", "")
        request_id = wanted if _GIVEN_ID.fullmatch(wanted) else f"{_random.getrandbits(96):024x}"
        scope[REQUEST_ID] = request_id
        began = time.perf_counter()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name for name, _ in message["headers"]}
                ours = [header for header in _SAFETY if header[0] not in given]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode()), *ours]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            scope["steptune.error"] = error
            if not status:
                await _send_problem(scope, send_with_headers, _INTERNAL)
        finally:
            self._record(scope, status, time.perf_counter() - began)

    def _record(self, scope: Scope, status: int, duration_s: float) -> None:
        route = _template(scope)
        self._metrics.observe(scope["method"], route, status, duration_s)
        error = scope.get("steptune.error")
        fields: dict[str, Any] = {
            "request_id": scope[REQUEST_ID],
            "method": scope["method"],
            "path": scope["path"],
            "route": route,
            "status": status,
            "duration_ms": round(duration_s * 1e3, 3),
            **scope.get("steptune.log_fields", {}),
        }
        level = logging.ERROR if error is not None else logging.INFO
        _log.log(level, "request", exc_info=error, extra={"fields": fields})


def _template(scope: Scope) -> str:
    """Return the path template of the operation, without parameter values, so that the number of different paths is
    limited.
    """
    path: str = getattr(scope.get("route"), "path", UNMATCHED)
    below = scope["path"].startswith(f"{PREFIX}/") and not path.startswith(PREFIX) and path != UNMATCHED
    return PREFIX + path if below else path  # routers know their own part only


_INTERNAL = RefusalError(
    500, "internal-error", "internal server error; the service's log has the details under the request's id"
)


class BodyLimitMiddleware:
    """Middleware that refuses bodies that are too large or do not arrive in time. A `Content-Length` above the limit is
    refused at once.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_upload_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        # Room for the form around the file.
        limit = self._max_upload_bytes + (1 << 16) if _is_upload(scope, headers) else self._max_bytes
        refusal = _refused_length(headers.get("content-length", "0"), limit)
        if refusal is not None:
            await _send_problem(scope, send, refusal)
            return
        received, began_s, is_complete = 0, time.monotonic(), False

        async def counted() -> Message:
            """Return the next message from the client: a chunk of the body or, after the last chunk, the disconnect.
            There is no time limit for the disconnect.
            """
            nonlocal received, is_complete
            if is_complete:
                return await receive()
            left_s = began_s + BODY_GRACE_S + received / SLOWEST_BYTES_PER_S - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    message = await receive()
            except TimeoutError:
                raise _too_slow() from None
            received += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if received > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, counted, send)


def _is_upload(scope: Scope, headers: Headers) -> bool:
    """Say whether a body is an upload. Uploads are written to disk as they arrive, after their sender is authenticated;
    other bodies are read into memory.
    """
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    is_form = headers.get("content-type", "").lower().startswith("multipart/form-data")
    return scope["method"] == "POST" and path == UPLOADS and is_form


def _refused_length(length: str, limit: int) -> RefusalError | None:
    if not (length.isascii() and length.isdecimal()):
        return RefusalError(
            400, "malformed-length", f"Content-Length must be a whole number of bytes, got {length[:50]!r}"
        )
    return _too_large(limit) if int(length) > limit else None


def _too_large(limit: int) -> RefusalError:
    detail = (
        f"the body must have at most {limit} bytes: send less, or raise STEPTUNE_MAX_BODY_BYTES (for uploads, "
        "STEPTUNE_MAX_UPLOAD_BYTES) of the service"
    )
    return RefusalError(413, "content-too-large", detail, headers={"Connection": "close"})


def _too_slow() -> RefusalError:
    detail = (
        f"the body must arrive within {BODY_GRACE_S:g} s, plus 1 s for every {SLOWEST_BYTES_PER_S >> 10} KiB: "
        "send it faster"
    )
    return RefusalError(408, "request-timeout", detail, headers={"Connection": "close"})


async def _send_problem(scope: Scope, send: Send, refusal: RefusalError) -> None:
    body = problem_bytes(refusal, scope["path"], scope.get(REQUEST_ID, ""))
    given = [(name.lower().encode(), value.encode()) for name, value in (refusal.headers or {}).items()]
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode()), *given]
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
