"""Connections to a server that may be gone, and statements that need no transaction."""

from contextlib import ExitStack

import pytest
from sqlalchemy import Engine, text

from steptune.service import connections
from steptune.service.connections import create_engine_for, querying, reading
from steptune.tuner.errors import StoreUnavailable


@pytest.fixture
def engine(postgres_url: str):
    engine = create_engine_for(postgres_url)
    yield engine
    engine.dispose()


def backend(engine: Engine) -> int:
    """Process of the server that serves a connection of the pool."""
    with querying(engine) as connection:
        return connection.scalar(text("select pg_backend_pid()"))


def end(engine: Engine, pid: int) -> None:
    other = create_engine_for(engine.url.render_as_string(hide_password=False))
    with querying(other) as connection:
        connection.execute(text("select pg_terminate_backend(:pid, 5000)"), {"pid": pid})
    other.dispose()


def test_a_connection_that_was_cut_while_nobody_used_it_is_replaced(engine: Engine, monkeypatch) -> None:
    first = backend(engine)
    end(engine, first)
    monkeypatch.setattr(connections, "TRUSTED_S", -1.0)  # as if it were long ago
    assert backend(engine) != first


def test_one_in_use_a_moment_ago_is_not_asked_whether_it_stands(engine: Engine, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(engine.dialect, "do_ping", asked.append)
    monkeypatch.setattr(connections, "TRUSTED_S", 3600.0)
    assert backend(engine) == backend(engine)
    assert asked == []
    monkeypatch.setattr(connections, "TRUSTED_S", -1.0)
    backend(engine)
    assert len(asked) == 1


def test_a_process_that_uses_all_its_connections_waits_as_for_a_busy_store(engine: Engine, monkeypatch) -> None:
    """A worker asks again, and loses nothing."""
    monkeypatch.setattr(engine.pool, "_timeout", 0.01)
    with ExitStack() as stack:
        for _ in range(connections.MAX_CONNECTIONS):
            stack.enter_context(querying(engine))
        with pytest.raises(StoreUnavailable, match="no free connection"), reading(engine) as session:
            session.execute(text("select 1"))


def test_connections_of_a_busy_time_are_kept(engine: Engine) -> None:
    def all_at_once() -> set[int]:
        with ExitStack() as stack:
            used = [stack.enter_context(querying(engine)) for _ in range(connections.MAX_CONNECTIONS)]
            return {connection.scalar(text("select pg_backend_pid()")) for connection in used}

    assert all_at_once() == all_at_once()


def test_a_query_opens_no_transaction_and_a_later_one_does(engine: Engine) -> None:
    def status(connection) -> str:
        connection.execute(text("select 1"))
        return connection.connection.dbapi_connection.info.transaction_status.name

    with querying(engine) as connection:
        assert status(connection) == "IDLE"
    with engine.connect() as connection:
        assert status(connection) == "INTRANS"
