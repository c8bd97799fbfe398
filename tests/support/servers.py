"""Servers in a thread of the test's own process, each on a port of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from marked import wait_until

from steptune.service.serving import Server


@contextmanager
def listening(config: uvicorn.Config) -> Iterator[tuple[Server, str]]:
    """The server and its address. It ends as by a signal."""
    config.port = 0
    server = Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), "the server has started")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.handle_exit(15, None)
        thread.join(120)
        assert not thread.is_alive()
