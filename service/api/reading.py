"""Endpoints that read rows: in a few threads of their own, first come, first served."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec

from fastapi.responses import Response

READERS = 2
"""Threads of a process that read rows for answers. Drivers let go of the interpreter in every statement: many threads
that all want it back spend their time on that, and whoever asks waits for the unluckiest."""

_threads = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
Given = ParamSpec("Given")


def reads_rows(endpoint: Callable[Given, Response]) -> Callable[Given, Awaitable[Response]]:
    """An endpoint that only asks the database, for what an index finds at once."""

    @functools.wraps(endpoint)
    async def wait_for_turn(*args: Given.args, **given: Given.kwargs) -> Response:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_threads, functools.partial(endpoint, *args, **given))

    return wait_for_turn
