"""POST requests that may be sent again: carried out once, and answered identically for a day.

The key is taken in a transaction of its own before the work, so that two requests at the same time do not both do it.
With the key, the id of the thing to be created is stored. If the process dies between the work and its answer, the
request that comes after `STALE` takes over and gets the same id, by which the work can see that it was done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Self

from fastapi import Depends, Header, Request
from fastapi.responses import Response
from sqlalchemy import Engine

from steptune.service.api.problems import RefusalError
from steptune.service.queries import idempotency as queries
from steptune.tuner.records import new_id

KEPT = timedelta(hours=24)
STALE = timedelta(seconds=10)
_KEPT_HEADERS = ("content-type", "location", "etag", "retry-after")


class Idempotency:
    """Idempotency key of a request, if it has one, and a digest of its method, path and body."""

    def __init__(self, key: str | None, request: Request, body: bytes) -> None:
        self._key = key
        method_and_path = f"{request.method} {request.url.path}\n".encode()
        self._request = method_and_path + body
        self._digest = hashlib.sha256(self._request).hexdigest()

    def of(self, content: bytes) -> Self:
        """Add a description of the body to the digest, for a body that is not in memory."""
        self._digest = hashlib.sha256(self._request + content).hexdigest()
        return self

    def run(self, engine: Engine, user_id: str, work: Callable[[str], Response]) -> Response:
        """Do `work` once for a key, and return its response; if an earlier request had this key, return the earlier
        response.

        Args:
            work: Function that takes the id of the thing to create, which a process that died may have created already.

        Raises:
            RefusalError: 409 while the first request is running, 422 if the first request asked for something else.
        """
        if self._key is None:
            return work(new_id())
        now = datetime.now(UTC)
        mine = queries.Taken(request_sha256=self._digest, new_id=new_id())
        found = queries.take(engine, user_id, self._key, mine, now, forget_before=now - KEPT, stale_before=now - STALE)
        if isinstance(found, queries.Earlier):
            return self._repeated(found)
        try:
            response = work(found.new_id)
        except BaseException:
            queries.give_back(engine, user_id, self._key)
            raise
        headers = {name: value for name, value in response.headers.items() if name in _KEPT_HEADERS}
        queries.keep(engine, user_id, self._key, response.status_code, json.dumps(headers), bytes(response.body))
        return response

    def _repeated(self, earlier: queries.Earlier) -> Response:
        if earlier.request_sha256 != self._digest:
            raise RefusalError(
                422,
                "idempotency-key-reused",
                f"the Idempotency-Key {self._key!r} was already used for another request: use a new one",
            )
        if earlier.status is None:
            raise RefusalError(
                409,
                "request-in-progress",
                "the first request with this Idempotency-Key is still being processed: try again soon",
                headers={"Retry-After": "1"},
            )
        headers = {**json.loads(earlier.headers or "{}"), "Idempotent-Replayed": "true"}
        return Response(earlier.body, earlier.status, headers)


async def _idempotency(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=200,
            pattern=r"^[\x21-\x7e]+$",
            description="Makes retries safe: of all requests with the same key within 24 hours, only one is carried "
            "out.",
        ),
    ] = None,
) -> Idempotency:
    """Build the `Idempotency` of a request. Its body has already been read and is small: uploads are read later."""
    is_upload = request.headers.get("content-type", "").lower().startswith("multipart/")
    return Idempotency(idempotency_key, request, b"" if is_upload else await request.body())


Once = Annotated[Idempotency, Depends(_idempotency)]
