"""Event streams of a running server: many clients, resuming, and ending."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from api_builders import API, Served, served, sqlite_url
from sqlalchemy import delete, select
from starlette.requests import Request

from steptune.service import event_hub
from steptune.service.api.events import EventStream, Followed
from steptune.service.app import create_app
from steptune.service.connections import writing
from steptune.service.event_hub import EventHub, Subscription
from steptune.service.models import EventRow
from steptune.service.serving import Server
from steptune.service.settings import Settings
from steptune.service.store import SqlStudyStore
from steptune.tuner.records import StudyState

STREAM = {"Accept": "text/event-stream"}
NUM_CLIENTS = 100


class Running(Served):
    """A server on a port of its own, in a thread."""

    def __init__(self, app, http: httpx.Client, server: Server, url: str) -> None:
        super().__init__(app, http)
        self.server = server
        self.url = url
        self.store = SqlStudyStore(self.services.engine)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token()}", **STREAM}


@pytest.fixture(params=["sqlite", "postgresql"])
def running(request, tmp_path) -> Iterator[Running]:
    url = sqlite_url(tmp_path) if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    settings = Settings(
        _env_file=None, database_url=url, data_directory=tmp_path / "data", event_poll_s=0.02, requests_per_minute=10**6
    )
    app = create_app(settings)
    server = Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        yield Running(app, http, server, f"http://127.0.0.1:{port}")
    server.handle_exit(15, None)
    thread.join(30)
    assert not thread.is_alive()


def ids_of(text: str) -> list[int]:
    """Of the events; before them comes the number after which the stream begins."""
    return [int(line[4:]) for line in text.splitlines() if line.startswith("id: ")][1:]


async def _follow(client: httpx.AsyncClient, path: str, headers: dict[str, str], began: asyncio.Semaphore) -> str:
    text = ""
    async with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        async for chunk in answer.aiter_text():
            if not text:
                began.release()
            text += chunk
    return text


def test_a_hundred_clients_get_every_event_in_order_until_the_study_ends(running: Running) -> None:
    study_id = running.submit()["study_id"]
    path = f"{API}/studies/{study_id}/events"

    async def follow() -> list[str]:
        began = asyncio.Semaphore(0)
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(base_url=running.url, limits=limits, timeout=60) as client:
            followers = [
                asyncio.create_task(_follow(client, path, running.headers(), began)) for _ in range(NUM_CLIENTS)
            ]
            for _ in range(NUM_CLIENTS):
                await began.acquire()
            for number in range(20):
                await asyncio.to_thread(running.store.add_event, study_id, "progress", {"number": number})
            await asyncio.to_thread(running.store.set_state, study_id, StudyState.COMPLETED)
            return await asyncio.gather(*followers)

    texts = asyncio.run(follow())
    expected = [event.sequence for event in running.store.events(study_id)]
    assert len(expected) >= 21
    assert [ids_of(text) for text in texts] == [expected] * NUM_CLIENTS


def test_a_client_that_comes_back_misses_nothing_and_gets_nothing_twice(running: Running) -> None:
    study_id = running.submit()["study_id"]
    for number in range(5):
        running.store.add_event(study_id, "progress", {"number": number})
    running.store.set_state(study_id, StudyState.COMPLETED)
    path = f"{API}/studies/{study_id}/events"
    expected = [event.sequence for event in running.store.events(study_id)]
    seen = ids_of(running.http.get(path, headers={**running.headers(), "Last-Event-ID": str(expected[2])}).text)
    assert seen == expected[3:]
    assert ids_of(running.http.get(path, headers=running.headers(), params={"after": expected[2]}).text) == expected[3:]
    done = running.http.get(path, headers={**running.headers(), "Last-Event-ID": str(expected[-1])})
    assert done.status_code == 204
    wrong = running.http.get(path, headers={**running.headers(), "Last-Event-ID": "x"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid-last-event-id")


def test_streams_of_a_study_that_goes_on_end_with_the_server(running: Running) -> None:
    study_id = running.submit()["study_id"]
    with running.http.stream("GET", f"{API}/studies/{study_id}/events", headers=running.headers()) as answer:
        chunks = answer.iter_text()
        assert "retry" in next(chunks)
        running.server.handle_exit(15, None)
        for _ in chunks:
            pass


def test_everybody_follows_their_own_studies(running: Running) -> None:
    """The stream of everything begins now, and shows others' studies to administrators only."""
    running.submit(user="bob")

    async def follow() -> list[str]:
        began = asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            tokens = running.token("ada"), running.token("root", "admin")
            followers = [
                asyncio.create_task(
                    _follow(client, f"{API}/events", {**STREAM, "Authorization": f"Bearer {token}"}, began)
                )
                for token in tokens
            ]
            for _ in followers:
                await began.acquire()
            for user in ("bob", "ada"):
                await asyncio.to_thread(running.submit, user=user)
            while len(running.services.events._order._held) or running.services.events._order.last < _last(running):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            running.server.handle_exit(15, None)
            return await asyncio.gather(*followers)

    ada, root = map(ids_of, asyncio.run(follow()))
    everything = [event.number for event in _all_events(running)]
    assert root == everything[1:]
    assert ada == everything[2:]


def _all_events(running: Running):
    from steptune.service.queries.events import events_after

    return events_after(running.services.engine, 0, 1000)


def _last(running: Running) -> int:
    return _all_events(running)[-1].number


def test_a_stream_ends_once_what_it_sends_is_no_longer_for_its_reader(tmp_path) -> None:
    with served(sqlite_url(tmp_path), tmp_path) as service:
        own, others = service.submit(user="ann")["study_id"], service.submit(user="bob")["study_id"]
        headers = [(b"authorization", f"Bearer {service.token('ann')}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "client": ("127.0.0.1", 1)}
        request = Request({**scope, "scheme": "http", "app": service.app, "query_string": b""})
        ann, bob = service.user_id("ann"), service.user_id("bob")

        def may_read(study_id: str | None, owner_id: str | None, visible_to: str | None) -> bool:
            followed = Followed(study_id=study_id, owner_id=owner_id, visible_to=visible_to, after=0)
            return asyncio.run(EventStream(request, service.services, followed)._may_still_read())

        assert may_read(own, None, ann)
        assert may_read(None, ann, ann)
        assert not may_read(None, None, None)
        assert not may_read(others, None, bob)


# --- the hub ------------------------------------------------------------------------------------


def _numbered(*numbers: int) -> list[event_hub.OwnedEvent]:
    return [
        event_hub.OwnedEvent(number=number, study_id="study", owner_id=None, kind="k", record="{}")
        for number in numbers
    ]


def test_a_missing_number_is_waited_for_and_then_passed_over() -> None:
    order = event_hub._InOrder(3)
    assert [e.number for e in order.add(_numbered(4, 6, 7), now_s=0.0)] == [4]
    assert order.holds_back("study")
    assert [e.number for e in order.add(_numbered(5, 6, 7), now_s=0.5)] == [5, 6, 7]
    assert not order.holds_back("study")
    assert order.add(_numbered(9), now_s=1.0) == []
    assert order.add(_numbered(9), now_s=1.0 + event_hub.GAP_PATIENCE_S / 2) == []
    assert [e.number for e in order.add(_numbered(9), now_s=1.1 + event_hub.GAP_PATIENCE_S)] == [9]


def test_gaps_that_stay_are_passed_over_together() -> None:
    order = event_hub._InOrder(3)
    assert order.add(_numbered(5, 7, 9), now_s=0.0) == []
    late = event_hub.GAP_PATIENCE_S + 0.1
    assert [e.number for e in order.add(_numbered(5, 7, 9, 11), now_s=late)] == [5, 7, 9]
    assert order.last == 9
    assert order.add(_numbered(11), now_s=late + 0.1) == []
    assert [e.number for e in order.add(_numbered(10, 11), now_s=late + 0.2)] == [10, 11]


@pytest.mark.parametrize(
    ("numbers", "begin"),
    [([], 0), ([1, 2, 3], 3), ([2, 3], 0), ([1, 2, 4, 6], 2), ([*range(501, 1501)], 1500), ([501, 1500], 501)],
)
def test_the_hub_begins_before_the_first_number_that_may_still_come(numbers: list[int], begin: int) -> None:
    assert event_hub._before_gaps(numbers) == begin


def test_an_event_that_is_committed_after_a_later_one_reaches_the_first_follower(tmp_path) -> None:
    """Who begins now gets it, and what had happened before not."""
    with served(sqlite_url(tmp_path), tmp_path) as service:
        engine, study_id = service.services.engine, service.submit()["study_id"]
        store = SqlStudyStore(engine)
        for number in range(2):
            store.add_event(study_id, "progress", {"number": number})
        with writing(engine) as session:
            late = session.scalars(select(EventRow).order_by(EventRow.event_id.desc()).offset(1).limit(1)).one()
            kept = {column.key: getattr(late, column.key) for column in EventRow.__table__.columns}
            session.delete(late)

        async def follow() -> list[bytes]:
            services = dataclasses.replace(service.services, events=EventHub(engine, poll_s=0.01))
            request = Request({"type": "http", "app": service.app, "headers": []})
            followed = Followed(study_id=None, owner_id=None, visible_to=None, after=-1)
            lines = EventStream(request, services, followed)._lines()
            found = [await anext(lines)]
            with writing(engine) as session:
                session.add(EventRow(**kept))
            found.append(await asyncio.wait_for(anext(lines), 30))
            await services.events.stop()
            return found + [line async for line in lines]

        first, *events = asyncio.run(follow())
        assert first == b"id: %d\nretry: 2000\n\n" % (kept["event_id"] - 1)
        assert ids_of("\n".join([first.decode(), *(line.decode() for line in events)])) == [kept["event_id"]]


def test_a_client_that_is_too_slow_is_told_to_come_back() -> None:
    subscription = Subscription(study_id="study", owner_id=None)
    for event in _numbered(*range(event_hub.MAX_WAITING + 1)):
        subscription.put(event)
    assert subscription.too_slow
    assert len(subscription.waiting) == event_hub.MAX_WAITING


def test_a_deleted_study_ends_its_stream(tmp_path) -> None:
    url = sqlite_url(tmp_path)
    app = create_app(Settings(_env_file=None, database_url=url, data_directory=tmp_path))
    engine = app.state.services.engine
    with writing(engine) as session:
        session.execute(delete(EventRow))

    async def follow() -> bool:
        hub = EventHub(engine, poll_s=0.01)
        subscription = await hub.subscribe("gone", None)
        await asyncio.wait_for(subscription.changed.wait(), 30)
        await hub.stop()
        return subscription.ended

    assert asyncio.run(follow())
    engine.dispose()
