"""Middleware for access control: the check of the host name where no login is required, the limit of simultaneous
requests, rate-limit headers, and the audit log.

Every request that changes something, and every refusal of somebody who tried, becomes one entry, whatever endpoint it
went to: none can forget it. A GET changes nothing, but for logins that begin elsewhere: what starts a session says so
in `request.state.is_change`. The entry is written before the answer is sent.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steptune.service.access.authentication import Access
from steptune.service.access.cookies import SAFE_METHODS
from steptune.service.access.errors import AccessError, HostRefusedError, NotAuthenticatedError, TooManyRequestsError
from steptune.service.access.open_access import check_host_header
from steptune.service.access.principal import Principal
from steptune.service.access.rate_limits import client_of
from steptune.service.api.problems import RefusalError, problem_response
from steptune.tuner.errors import StoreError

log = logging.getLogger("steptune.access")


class AccessMiddleware:
    """Access middleware. It is plain ASGI, so that streams pass through unbuffered."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if self._access.settings.insecure_no_auth:
                check_host_header(HTTPConnection(scope))
        except HostRefusedError as error:
            await _refuse(error, scope, receive, send)
            return
        client = _counted_as(scope, client_of(self._access.proxies.client_address(HTTPConnection(scope))))
        try:
            self._access.open_of_client.enter(client)
        except TooManyRequestsError as error:
            await _refuse(error, scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(state.get("rate_limit", {}))
                await self._audit(scope, state, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            self._access.open_of_client.leave(client)
            if "open_of_user" in state:
                self._access.open_of_user.leave(state["open_of_user"])

    async def _audit(self, scope: Scope, state: dict[str, Any], status: int) -> None:
        principal: Principal | None = state.get("principal")
        refusal: AccessError | None = state.get("refusal")
        is_change = scope["method"] not in SAFE_METHODS or state.get("is_change", False)
        if not _is_worth_an_entry(is_change, principal, refusal):
            return
        await run_in_threadpool(self._record, scope, state, principal, refusal, status)

    def _record(
        self,
        scope: Scope,
        state: dict[str, Any],
        principal: Principal | None,
        refusal: AccessError | None,
        status: int,
    ) -> None:
        detail = {
            "method": scope["method"],
            "status": status,
            "address": self._access.proxies.client_address(HTTPConnection(scope)),
            **state.get("audit", {}),
        }
        outcome = refusal.code if refusal is not None else "done" if status < 400 else "failed"
        try:
            self._access.audit.record(
                principal,
                action=getattr(scope.get("route"), "name", "unknown"),
                target=scope["path"],
                outcome=outcome,
                request_id=scope.get("steptune.request_id", ""),
                detail=detail,
            )
        except StoreError:  # what was done is done; the answer must still say so
            log.exception("failed to write an entry of the audit log: %s %s", scope["method"], scope["path"])


def _counted_as(scope: Scope, client: str) -> str:
    """Return the key under which a request is counted against the limit of simultaneous requests. Requests with a body
    are counted separately from other requests of the same address, so that slow bodies do not block reads.
    """
    headers = Headers(scope=scope)
    sends_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    return f"{client} with a body" if sends_body else client


async def _refuse(error: AccessError, scope: Scope, receive: Receive, send: Send) -> None:
    refusal = RefusalError(error.status, error.code, error.detail, headers=error.headers, context=error.members)
    await problem_response(Request(scope), refusal)(scope, receive, send)


def _is_worth_an_entry(is_change: bool, principal: Principal | None, refusal: AccessError | None) -> bool:
    if isinstance(refusal, TooManyRequestsError):
        return False  # a flood must not fill the database
    if refusal is not None and principal is None:
        # Without any token it is a browser that has not logged in, or a scanner: of no use, and without end.
        return not isinstance(refusal, NotAuthenticatedError) or refusal.token_sent
    return refusal is not None or (principal is not None and is_change)
