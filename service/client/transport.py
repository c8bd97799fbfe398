"""HTTP requests with time limits and safe retries; problems are raised as exceptions."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from steptune._version import __version__
from steptune.service.client.errors import ServiceUnreachableError, error_of
from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import new_id

API = "/api/v1"
RETRIED_STATUSES = (429, 502, 503, 504)
IN_PROGRESS = "request-in-progress"
"""Error code of a repeated request: the first request with the same idempotency key is still running, and its answer
was lost.
"""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
Answer = TypeVar("Answer")


class Transport:
    """Transport of requests to one service.

    Args:
        url: Address of the service, with a base path if it has one: https://host/steptune.
        token: Bearer token; None where the service needs no login.
        timeout_s: Maximum seconds without progress of a read or write.
        retries: Maximum number of times that a request is sent again.
        transport: Transport of httpx that tests set; httpx's default otherwise.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        timeout_s: float = 30.0,
        retries: int = 4,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ChoiceError(f"{url!r} is not the address of a service: write it like https://host:8700")
        headers = {"User-Agent": f"steptune/{__version__}", "Accept": "application/json"}
        if token is not None:
            if not token.isascii() or not token.isprintable() or " " in token:
                raise ChoiceError("invalid token: Steptune's tokens begin with stp_ and have no spaces")
            headers["Authorization"] = f"Bearer {token}"
        self.url = url.rstrip("/")
        self._retries = retries
        self._http = httpx.Client(
            base_url=f"{self.url}{API}",
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            transport=transport,
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, kind: type[Answer], **query: Any) -> Answer:
        """Read a resource as a record."""
        return self._decoded(self._send("GET", path, query), kind)

    def get_text(self, path: str, **query: Any) -> str:
        """Read a resource as text."""
        return self._send("GET", path, query, headers={"Accept": "*/*"}).text

    def get_bytes(self, path: str, **query: Any) -> bytes:
        """Read a file as bytes."""
        return self._send("GET", path, query, headers={"Accept": "*/*"}).content

    def post(self, path: str, kind: type[Answer], body: Any = None, *, key: str | None = None) -> Answer:
        """Post a request; with an idempotency key, it is safe to send the request again."""
        content = {"json": body} if body is not None else {}
        return self._decoded(self._send("POST", path, {}, headers=_once(key), content=lambda: content), kind)

    def post_form(self, path: str, kind: type[Answer], form: Callable[[], dict[str, Any]]) -> Answer:
        """Post a file; `form` returns httpx's arguments for each attempt."""
        return self._decoded(self._send("POST", path, {}, headers=_once(None), content=form), kind)

    def patch(self, path: str, kind: type[Answer], body: Any, version: str | None = None) -> Answer:
        """Change a resource. The request is not retried: the change may have been made although its answer was lost."""
        headers = {"If-Match": version} if version else {}
        return self._decoded(self._send("PATCH", path, {}, headers=headers, content=lambda: {"json": body}), kind)

    def delete(self, path: str) -> None:
        """Delete a resource. If the request is repeated because an answer was lost, the absence of the resource counts
        as success.
        """
        self._send("DELETE", path, {}, gone_is_fine=True)

    @contextmanager
    def streaming(
        self, path: str, *, headers: Mapping[str, str], read_s: float | None = None
    ) -> Iterator[httpx.Response]:
        """Open a response to be read in chunks; its request is not retried."""
        timeout = self._http.timeout if read_s is None else httpx.Timeout(self._http.timeout.connect, read=read_s)
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    raise error_of(response.status_code, response.read(), _request_id(response))
                yield response
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        content: Callable[[], dict[str, Any]] = dict,
        gone_is_fine: bool = False,
    ) -> httpx.Response:
        params = {name: value for name, value in query.items() if value is not None}
        left = 0 if method == "PATCH" else self._retries
        pause_s = FIRST_PAUSE_S
        lost = False
        while True:
            try:
                response = self._http.request(method, path, params=params, headers=headers, **content())
            except httpx.TransportError as error:
                if not left:
                    raise self._unreachable(error) from error
                lost, asked_s = True, 0.0
            else:
                if response.is_success or (response.status_code == 404 and lost and gone_is_fine):
                    return response
                refusal = error_of(response.status_code, response.content, _request_id(response))
                if not left or not (response.status_code in RETRIED_STATUSES or refusal.problem.code == IN_PROGRESS):
                    raise refusal
                asked_s = _retry_after_s(response)
            left -= 1
            time.sleep(max(min(asked_s, LONGEST_PAUSE_S), pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _decoded(self, response: httpx.Response, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise ServiceUnreachableError(
                f"{self.url} gave an answer that Steptune {__version__} cannot read ({error}): check "
                "that this is the address of a Steptune service of the same version"
            ) from error

    def _unreachable(self, error: Exception) -> ServiceUnreachableError:
        reason = str(error) or type(error).__name__
        return ServiceUnreachableError(
            f"{self.url} cannot be reached: {reason}; check the address, and that the service runs"
        )


def _once(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": key or new_id()}


def _request_id(response: httpx.Response) -> str:
    return str(response.headers.get("X-Request-ID", ""))


def _retry_after_s(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0
