"""What another request does between two statements of one, on PostgreSQL; on SQLite a writer is alone."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from api_builders import Served, served
from sqlalchemy import Engine, event

from service.queries import idempotency


@pytest.fixture
def service(postgres_url, tmp_path) -> Iterator[Served]:
    with served(postgres_url, tmp_path) as found:
        yield found


def before(engine: Engine, text: str, action: Callable[[], object]) -> None:
    """Does something once, just before a statement that contains a text."""

    waiting = [action]

    def look(connection, cursor, statement, parameters, context, many) -> None:
        if text in statement and waiting:
            waiting.pop()()

    event.listen(engine, "before_cursor_execute", look)


def test_a_key_that_is_given_back_at_this_moment_is_taken(service: Served) -> None:
    """The first request was refused just after the second found its key."""
    service.token()
    engine, user, now = service.services.engine, service.user_id("ada"), datetime.now(UTC)

    def take(new_id: str) -> idempotency.Taken | idempotency.Earlier:
        mine = idempotency.Taken(request_sha256="same", new_id=new_id)
        long_ago = now - timedelta(days=1)
        return idempotency.take(engine, user, "key", mine, now, forget_before=long_ago, stale_before=long_ago)

    take("first")
    before(engine, "FOR UPDATE", lambda: idempotency.give_back(engine, user, "key"))
    assert take("second") == idempotency.Taken(request_sha256="same", new_id="second")
