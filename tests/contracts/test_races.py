"""Effects of another request between two statements of one, on PostgreSQL; on SQLite a writer is alone."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from api_builders import Served, served
from builders import sample_study
from sqlalchemy import Engine, event

from steptune.service.connections import create_engine_for
from steptune.service.queries import idempotency
from steptune.service.queries.workloads import delete_workload
from steptune.service.queue import StudyQueue
from steptune.tuner.errors import StoreError
from steptune.tuner.records import StudySettings


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


@pytest.fixture
def impatient(postgres_url) -> Iterator[Engine]:
    """Connections that wait for no lock."""
    engine = create_engine_for(f"{postgres_url}&options=-c%20lock_timeout%3D50")
    yield engine
    engine.dispose()


@pytest.fixture
def workload_id(service: Served) -> str:
    return service("POST", "/workloads", json={"entry": "zoo:synthetic"}).json()["workload_id"]


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


def test_a_study_cannot_come_between_the_check_of_a_workload_and_its_deletion(
    service: Served, workload_id: str, impatient: Engine
) -> None:
    """It would have waited for the deletion, and then not found the workload."""
    study = sample_study(facts=None, environment=None, settings=StudySettings())
    refused = []

    def submit() -> None:
        with pytest.raises(StoreError, match="lock timeout") as error:
            StudyQueue(impatient).submit(study, owner_id=service.user_id("ada"), source_id=workload_id)
        refused.append(error)

    before(service.services.engine, "DELETE FROM workload_sources", submit)
    assert service("DELETE", f"/workloads/{workload_id}").status_code == 204
    assert len(refused) == 1
    assert service("GET", "/studies").json()["items"] == []


def test_a_workload_that_is_deleted_while_a_study_of_it_is_submitted_is_not_found(
    service: Served, workload_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no study is left that has none."""
    queue = service.services.queue
    submit = queue.submit

    def too_late(*study, **requirements):
        delete_workload(service.services.engine, workload_id)
        return submit(*study, **requirements)

    monkeypatch.setattr(queue, "submit", too_late)
    answer = service("POST", "/studies", json={"workload_id": workload_id})
    assert (answer.status_code, answer.json()["code"]) == (404, "workload-not-found")
    assert service("GET", "/studies").json()["items"] == []
