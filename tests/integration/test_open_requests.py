"""Limits on what one user, client or study may hold open: streams, requests, heads and bodies that do not come."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from api_builders import API, Served, sqlite_url
from marked import wait_until
from servers import listening

from steptune.service.api import middleware
from steptune.service.app import create_app
from steptune.service.serving import _config
from steptune.service.settings import Settings
from steptune.service.slow_heads import PromptHeads

STREAM = {"Accept": "text/event-stream"}


@contextmanager
def running(tmp_path, **limits) -> Iterator[Served]:
    """The server as `serve` runs it, on a port of its own."""
    url = sqlite_url(tmp_path)
    settings = Settings(_env_file=None, database_url=url, data_directory=tmp_path / "data", event_poll_s=0.02, **limits)
    app = create_app(settings)
    with listening(_config(app, settings)) as (_, address), httpx.Client(base_url=address, timeout=60) as http:
        yield Served(app, http)


def opened(service: Served, stack: ExitStack, path: str, user: str) -> httpx.Response:
    headers = {**STREAM, "Authorization": f"Bearer {service.token(user)}"}
    answer = stack.enter_context(service.http.stream("GET", f"{API}{path}", headers=headers))
    if answer.status_code == 200:
        lines: Any = answer.iter_lines()
        next(lines)
        stack.callback(lines.close)  # a generator that is forgotten would close the answer
    else:
        answer.read()
    return answer


def test_one_user_holds_so_many_streams_and_others_have_theirs(tmp_path) -> None:
    with running(tmp_path, max_user_event_streams=2) as service, ExitStack() as stack:
        with ExitStack() as first:
            for _ in range(2):
                assert opened(service, first, "/events", "ada").status_code == 200
            refused = opened(service, stack, "/events", "ada")
            assert (refused.status_code, refused.json()["context"]["setting"]) == (
                429,
                "STEPTUNE_MAX_USER_EVENT_STREAMS",
            )
            assert "2 concurrent event streams of one user" in refused.json()["detail"]
            assert opened(service, stack, "/events", "bob").status_code == 200
            assert service("GET", "/me").status_code == 200, "only streams are used up"
        streams = service.services.streams.of_user
        wait_until(lambda: streams.num_open(service.user_id("ada")) == 0, "what was closed is given back")
        assert opened(service, stack, "/events", "ada").status_code == 200


def test_one_study_is_followed_so_often(tmp_path) -> None:
    with running(tmp_path, max_study_event_streams=1) as service, ExitStack() as stack:
        first, second = (service.submit()["study_id"] for _ in range(2))
        assert opened(service, stack, f"/studies/{first}/events", "ada").status_code == 200
        assert "of one study" in opened(service, stack, f"/studies/{first}/events", "ada").json()["detail"]
        assert opened(service, stack, f"/studies/{second}/events", "ada").status_code == 200
        assert service.services.streams.of_user.num_open(service.user_id("ada")) == 2, "a refused one is not counted"


@pytest.mark.parametrize("whose", ["user", "client"])
def test_so_many_requests_are_at_work_at_once(tmp_path, whose: str) -> None:
    with running(tmp_path, **{f"max_{whose}_requests": 3}) as service:
        with ExitStack() as stack:
            for _ in range(3):
                assert opened(service, stack, "/events", "ada").status_code == 200
            refused = service("GET", "/me")
            assert (refused.status_code, refused.json()["code"]) == (429, "too-many-requests")
            assert refused.json()["context"] == {"limit": 3, "setting": f"STEPTUNE_MAX_{whose.upper()}_REQUESTS"}
            others = service("GET", "/me", user="bob").status_code
            assert others == (200 if whose == "user" else 429), "all come from one address here"
        wait_until(lambda: service("GET", "/me").status_code == 200, "what has ended is given back")


def connected(service: Served) -> socket.socket:
    url = service.http.base_url
    return socket.create_connection((url.host, url.port), timeout=30)


def all_of(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    return received


@pytest.mark.parametrize("begin", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_head_that_does_not_come_is_not_waited_for(tmp_path, monkeypatch, begin: bytes) -> None:
    monkeypatch.setattr(PromptHeads, "head_timeout_s", 0.3)
    with running(tmp_path) as service:
        with connected(service) as connection:
            connection.sendall(begin)
            assert b" 408 " in all_of(connection).partition(b"\r\n")[0]
        with connected(service) as connection:  # the second one of a connection
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            connection.sendall(begin)
            received = all_of(connection)
        assert (b" 408 " in received) == bool(begin), "an idle one is closed without a word"


def test_who_sends_the_head_in_time_may_wait_long_for_the_answer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(PromptHeads, "head_timeout_s", 0.3)
    with running(tmp_path) as service, ExitStack() as stack:
        headers = {**STREAM, "Authorization": f"Bearer {service.token('ada')}"}
        answer = stack.enter_context(service.http.stream("GET", f"{API}/events", headers=headers))
        lines: Any = answer.iter_lines()
        assert next(lines).startswith("id: ")
        time.sleep(0.6)
        service.submit()
        assert any(line.startswith("event: state") for line in lines)


def test_bodies_that_do_not_come_keep_nobody_at_their_address_from_reading(tmp_path) -> None:
    head = f"POST {API}/session HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with running(tmp_path, max_client_requests=3) as service, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(service)).sendall(head.encode())
        wait_until(lambda: service("POST", "/session", json={}).status_code == 429, "three bodies are waited for")
        assert service("GET", "/me").status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path, monkeypatch) -> None:
    """Whoever sends it: the body of a login is read before anybody is known."""
    monkeypatch.setattr(middleware, "BODY_GRACE_S", 0.3)
    head = f"POST {API}/session HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with running(tmp_path) as service, connected(service) as connection:
        connection.sendall(head.encode() + b'{"token": "')
        received = all_of(connection)
    assert received.startswith(b"HTTP/1.1 408")
    assert b"the body must arrive within" in received
