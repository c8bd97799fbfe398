"""Endpoints that read rows: they run in a few threads of their own, in the order of arrival."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec

from fastapi.responses import Response

READERS = 2
"""Number of threads in which a process reads database rows for responses. Database drivers release the interpreter lock
in every statement: many threads would spend their time contending for it, and some requests would wait long.
"""

_threads = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
Given = ParamSpec("Given")


def reads_rows(endpoint: Callable[Given, Response]) -> Callable[Given, Awaitable[Response]]:
    """Run an endpoint, which only reads database rows by index, in one of the few threads for such reads."""

    @functools.wraps(endpoint)
    async def wait_for_turn(*args: Given.args, **given: Given.kwargs) -> Response:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_threads, functools.partial(endpoint, *args, **given))

    return wait_for_turn
