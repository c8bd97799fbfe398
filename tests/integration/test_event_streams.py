"""Event streams of a running server: many clients, resuming, and ending."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from api_builders import API, Served, served, sqlite_url
from marked import wait_until
from servers import listening
from sqlalchemy import delete, text
from sqlalchemy.orm import Session
from starlette.requests import Request

from steptune.service import event_hub
from steptune.service.api.events import EventStream, Followed
from steptune.service.app import create_app
from steptune.service.connections import writing
from steptune.service.event_hub import EventHub, Subscription
from steptune.service.models import EventRow
from steptune.service.queries.events import _nearest, horizon
from steptune.service.serving import Server
from steptune.service.settings import Settings
from steptune.service.store import NUMBERS_MODULO, SqlStudyStore, write_event
from steptune.tuner.errors import StoreUnavailableError
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
        _env_file=None,
        database_url=url,
        data_directory=tmp_path / "data",
        event_poll_s=0.02,
        requests_per_minute=10**6,
        max_user_requests=2 * NUM_CLIENTS,
        max_user_event_streams=NUM_CLIENTS,
    )
    app = create_app(settings)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    with listening(config) as (server, url), httpx.Client(base_url=url, timeout=60) as http:
        yield Running(app, http, server, url)


def ids_of(text: str) -> list[int]:
    """Numbers of the events; before them comes the number after which the stream begins."""
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
            while running.services.events._last < _last(running):
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


class OnDemand(EventHub):
    """Looks when the test says so, and at no other time."""

    async def _run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def postgres_running(postgres_url, tmp_path) -> Iterator[Served]:
    with served(postgres_url, tmp_path) as service:
        yield service


def test_an_event_that_is_committed_long_after_a_later_one_reaches_everybody(postgres_running) -> None:
    """Whoever follows all, whoever begins meanwhile, and pages: all wait for it, and only for it."""
    service, engine = postgres_running, postgres_running.services.engine
    slow, quick = (service.submit()["study_id"] for _ in range(2))
    headers = {"Authorization": f"Bearer {service.token()}"}
    store = SqlStudyStore(engine)

    async def follow() -> list[list[int]]:
        hub = OnDemand(engine, poll_s=0.01)
        first = await hub.subscribe(None, None)
        before = first.begins_after
        with Session(engine) as session, session.begin():
            write_event(session, slow, "progress", {"late": True})
            await asyncio.to_thread(store.add_event, quick, "progress", {"number": 0})
            meanwhile = await hub.subscribe(None, None)
            page = service.http.get(f"{API}/events", params={"after": before}, headers=headers).json()
            for _ in range(3):
                await hub._look()
            assert (list(first.waiting), list(meanwhile.waiting), page["items"]) == ([], [], [])
            assert meanwhile.begins_after == before
        await hub._look()
        await hub.stop()
        late = service.http.get(f"{API}/events", params={"after": before}, headers=headers).json()
        told = [[event.number for event in one.waiting] for one in (first, meanwhile)]
        return [*told, [event["sequence"] for event in late["items"]]]

    told = asyncio.run(follow())
    both = [store.events(study)[-1].sequence for study in (slow, quick)]
    assert both[0] < both[1], "the late one has the lower number"
    assert told == [both] * 3


def test_a_number_that_was_rolled_back_holds_nothing_up(postgres_running) -> None:
    engine, study_id = postgres_running.services.engine, postgres_running.submit()["study_id"]
    with Session(engine) as session:
        write_event(session, study_id, "progress", {})
        session.rollback()
    SqlStudyStore(engine).add_event(study_id, "progress", {})
    found = horizon(engine)
    assert found.final == found.newest == SqlStudyStore(engine).events(study_id)[-1].sequence


def test_a_writer_that_begins_between_two_looks_holds_back_its_own_number_only(postgres_running) -> None:
    """It read a newer number than the one who looks at the horizon: what that one saw is final."""
    assert [_nearest(5, 3), _nearest(5, 5), _nearest(5, 7)] == [3, 5, 7]
    assert _nearest(NUMBERS_MODULO + 2, NUMBERS_MODULO - 1) == NUMBERS_MODULO - 1
    assert _nearest(NUMBERS_MODULO - 1, 1) == NUMBERS_MODULO + 1


def test_a_writer_that_stops_before_its_commit_is_ended_by_the_server(postgres_running) -> None:
    """Nobody is held up for longer, and the writer may try again."""
    engine, study_id = postgres_running.services.engine, postgres_running.submit()["study_id"]
    before = horizon(engine)
    with pytest.raises(StoreUnavailableError), writing(engine) as session:  # noqa: PT012
        write_event(session, study_id, "progress", {})
        session.execute(text("SET LOCAL idle_in_transaction_session_timeout = 1"))
        wait_until(lambda: not _others_in_transaction(engine), "the server has ended it")
        session.flush()
        session.execute(text("SELECT 1"))
    assert horizon(engine) == before


def _others_in_transaction(engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(
            text(
                "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in tr%' AND datname = current_database()"
            )
        )


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
