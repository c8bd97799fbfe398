"""Access for tests: a clock that stands still until told, stores on a database, and an application over it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine
from starlette.testclient import TestClient

from steptune.service.access.authentication import Access
from steptune.service.access.users import User
from steptune.service.app import create_app
from steptune.service.settings import Settings
from steptune.service.settings.access import AccessSettings
from steptune.service.settings.scopes import Scope

BEGINNING = datetime(2026, 3, 1, 12, tzinfo=UTC)
HTTPS = "https://tune.example.org"


class Clock:
    """Says the time that it was set to."""

    def __init__(self) -> None:
        self.now = BEGINNING

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **duration: float) -> None:
        self.now += timedelta(**duration)


class People:
    """Users and tokens, made in one line each."""

    def __init__(self, access: Access) -> None:
        self.access = access

    def user(self, name: str = "ada", scopes: str = "read submit", **changes) -> User:
        return self.access.users.create(name, map(Scope, scopes.split()), **changes)

    def token(self, user: User, scopes: str | None = None, days: float | None = 30, name: str = "") -> str:
        _, bearer = self.access.tokens.issue(
            user.user_id, name=name, scopes=map(Scope, (scopes or " ".join(user.scopes)).split()), days=days
        )
        return bearer.text

    def new_token(self, name: str, scopes: str) -> str:
        return self.token(self.user(name, scopes))


def access_on(engine: Engine, clock: Callable[[], datetime], **settings) -> Access:
    return Access(engine, AccessSettings(**settings), clock)


@contextmanager
def application(
    url: str,
    tmp_path,
    *,
    client: str = "203.0.113.7",
    base_url: str = "http://service",
    root_path: str = "",
    **settings,
):
    """A client of an application, and its access, whose clock stands still."""
    app = create_app(Settings(_env_file=None, database_url=url, data_directory=tmp_path / "data", **settings))
    clock = Clock()
    app.state.access = access = Access(app.state.services.engine, app.state.services.settings, clock)
    for middleware in app.user_middleware:
        if "access" in middleware.kwargs:
            middleware.kwargs["access"] = access
    with TestClient(
        app, base_url=base_url, client=(client, 50000), root_path=root_path, follow_redirects=False
    ) as http:
        yield Served(http, access, clock)


class Served:
    """An application that a test talks to."""

    def __init__(self, http: TestClient, access: Access, clock: Clock) -> None:
        self.http = http
        self.access = access
        self.clock = clock
        self.people = People(access)

    def as_token(self, token: str, method: str, path: str, **arguments):
        headers = {"Authorization": f"Bearer {token}", **arguments.pop("headers", {})}
        return self.http.request(method, f"/api/v1{path}", headers=headers, **arguments)

    def log_in(self, token: str) -> str:
        """A session for the client; its CSRF token."""
        answer = self.http.post("/api/v1/session", json={"token": token})
        assert answer.status_code == 201, answer.text
        return answer.json()["csrf_token"]

    def entries(self) -> list:
        return self.access.audit.page(limit=200)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def texts_of(engine: Engine) -> Iterator[str]:
    """Every text in every table."""
    from steptune.service.connections import reading
    from steptune.service.models import Base

    with reading(engine) as session:
        for table in Base.metadata.sorted_tables:
            for row in session.execute(table.select()):
                yield from (str(value) for value in row if value is not None)
