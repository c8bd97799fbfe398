"""Stream of server-sent events, resumed where the connection broke."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import msgspec

from steptune.service.client.errors import ServiceError, ServiceUnreachableError
from steptune.service.client.transport import RETRIED_STATUSES, Transport
from steptune.tuner.records import Event

SILENCE_S = 45.0
"""Seconds of silence after which the connection counts as dead; the service sends something every 15 seconds."""
RETRY_S = 1.0
MAX_FAILURES = 10
"""Maximum consecutive failures before a stream is given up; a stream that resumes sets the count to zero."""


def follow(transport: Transport, path: str, after: int) -> Iterator[Event | None]:
    """Yield events with numbers above `after`, without gaps, until the study ends. Also yield None now and then, so
    that the caller can check the time.

    Raises:
        ServiceError: The request is refused.
        ServiceUnreachableError: The service remains unreachable.
    """
    failures = 0
    while True:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        try:
            with transport.streaming(path, headers=headers, read_s=SILENCE_S) as response:
                if response.status_code == httpx.codes.NO_CONTENT:
                    return
                for event in _parsed(response.iter_lines()):
                    failures = 0
                    if event is not None:
                        after = event.sequence
                    yield event
        except ServiceUnreachableError:
            failures += 1
            if failures >= MAX_FAILURES:
                raise
        except ServiceError as error:
            failures += 1
            if failures >= MAX_FAILURES or error.problem.status not in RETRIED_STATUSES:
                raise
        yield None
        time.sleep(RETRY_S)


def _parsed(lines: Iterator[str]) -> Iterator[Event | None]:
    """Yield the events of a stream of server-sent events, and None for each comment. Only the parts of the format that
    the service uses are supported.
    """
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif line.startswith(":"):
            yield None
        elif not line and data:
            yield msgspec.json.decode("\n".join(data), type=Event)
            data = []
