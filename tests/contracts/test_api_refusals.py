"""Refusals at every operation, and requests that mean harm."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from api_builders import API, Served, served, sqlite_url
from sqlalchemy import update

from steptune.service.api.problems import MEDIA_TYPE
from steptune.service.app import create_app
from steptune.service.connections import writing
from steptune.service.models import ApiTokenRow
from steptune.service.settings import Settings
from steptune.service.settings.scopes import Scope

DOCUMENT = create_app(Settings(_env_file=None, database_url="sqlite://")).openapi()
GUARDED = [
    (path, method, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if operation["operationId"] not in {"healthz", "readyz", "metrics", "open_session"}
]
every_operation = pytest.mark.parametrize(
    ("path", "method", "operation"), GUARDED, ids=[operation["operationId"] for _, _, operation in GUARDED]
)
VALUES = {"format": "yaml", "artifact_id": "1", "fingerprint": "0"}


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("refusals")
    with served(sqlite_url(folder), folder, max_upload_bytes=1 << 20) as found:
        yield found


@pytest.fixture(scope="module")
def bad_tokens(service: Served) -> dict[str, str]:
    """Tokens of an administrator that are not valid (any more)."""
    access = service.app.state.access
    user = access.users.create("admin", [Scope.ADMIN])
    made = {
        name: access.tokens.issue(user.user_id, name=name, scopes=[Scope.ADMIN], days=1)
        for name in ("expired", "revoked", "forged")
    }
    access.tokens.revoke(made["revoked"][0].token_id)
    with writing(service.services.engine) as session:
        expired = update(ApiTokenRow).where(ApiTokenRow.token_id == made["expired"][0].token_id)
        session.execute(expired.values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    tokens = {name: bearer.text for name, (_, bearer) in made.items()}
    return {**tokens, "forged": f"{tokens['forged'][:-1]}{'0' if tokens['forged'][-1] != '0' else '1'}", "none": ""}


def _send(service: Served, method: str, path: str, operation: dict, token: str):
    """The operation with a right body where it takes one, so that only the token can be what is refused."""
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", VALUES.get(parameter["name"], "abc"))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = {"json": BODIES.get(operation["operationId"], {})} if "requestBody" in operation else {}
    return service.http.request(method.upper(), path, headers=headers, **body)


BODIES = {
    "create_workload": {"entry": "zoo:synthetic"},
    "submit_study": {"workload": "zoo:synthetic"},
    "create_token": {"scopes": ["read"]},
    "create_user": {"name": "new", "scopes": ["read"]},
}


@pytest.mark.parametrize("kind", ["none", "expired", "revoked", "forged"])
@every_operation
def test_without_a_valid_token_nothing_is_done(path, method, operation, kind, service, bad_tokens) -> None:
    answer = _send(service, method, path, operation, bad_tokens[kind])
    assert answer.status_code == 401, answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert answer.headers["www-authenticate"].startswith("Bearer")


@every_operation
def test_a_token_without_the_scope_is_refused(path, method, operation, service) -> None:
    needed = {scope for entry in operation["security"] for scopes in entry.values() for scope in scopes}
    if not needed:
        pytest.skip("whoever is known may do this")
    others = [scope.value for scope in Scope if scope.value not in {*needed, "admin"}]
    token = service.token(f"without {' '.join(sorted(needed))}", " ".join(others))
    answer = _send(service, method, path, operation, token)
    assert answer.status_code == 403, answer.text
    assert answer.json()["code"] == "missing-scope"


@pytest.mark.parametrize(
    ("path", "method", "operation"),
    [(path, method, operation) for path, methods in DOCUMENT["paths"].items() for method, operation in methods.items()],
    ids=lambda value: value.get("operationId", "") if isinstance(value, dict) else None,
)
def test_a_parameter_that_an_operation_does_not_have_is_refused(path, method, operation, service) -> None:
    """Every operation refuses it, once it is known who asks."""
    BODIES.setdefault("open_session", {"token": "x"})
    answer = _send(service, method, f"{path}?no_such=1", operation, service.token("asks", "read submit worker admin"))
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request"), answer.text
    assert answer.json()["errors"][0]["pointer"] == "query/no_such"


def test_a_mistyped_filter_is_named_with_what_is_meant(service: Served) -> None:
    found = service("GET", "/studies?staet=failed").json()
    assert "did you mean state?" in found["errors"][0]["message"]
    assert "workload_id" in found["errors"][0]["message"]


def test_a_filter_that_is_given_twice_is_refused(service: Served) -> None:
    """One of the two would be dropped in silence."""
    answer = service("GET", "/studies?state=failed&state=running")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "query/state"


def test_every_operation_says_what_scope_it_needs() -> None:
    without = {
        operation["operationId"]
        for _, _, operation in GUARDED
        if not any(scopes for entry in operation["security"] for scopes in entry.values())
    }
    assert without == {"get_me", "get_session", "close_session"}


# --- harm ---------------------------------------------------------------------------------------

HOSTILE = [
    "'; DROP TABLE studies; --",
    '" OR 1=1 --',
    "<script>alert(1)</script>",
    "{{7*7}} ${7*7} %s %(x)s",
    "../../../etc/passwd",
    "\u202e\ufeff\U0001f4a3",
    "a" * 200,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text(text: str, service: Served) -> None:
    """SQL and HTML in every field that takes a text: kept or looked for as it is, or refused."""
    study = service.submit(title=text, hardware=text)
    assert (study["title"], study["queue"]["required_hardware"]) == (text, text)
    changed = service("PATCH", f"/studies/{study['study_id']}", json={"title": f"{text}"[:199] + "!"})
    assert changed.json()["title"] == text[:199] + "!"
    named = service("POST", "/workloads", json={"entry": "zoo:synthetic", "name": text})
    assert named.json()["name"] == text
    uploaded = service("POST", "/workloads", files={"file": (text, b"x")}, data={"entry": text, "name": text})
    assert uploaded.status_code in (400, 422), uploaded.text
    assert service("GET", "/studies", params={"workload": text}).json()["items"] == []
    for parameter in ("state", "owner", "workload_id", "hardware", "cursor", "limit"):
        assert service("GET", "/studies", params={parameter: text}).status_code in (200, 400, 422)
    for field in ("workload", "workload_id", "device", "only", "allow"):
        refused = service("POST", "/studies", json={"workload": "zoo:synthetic", field: text})
        assert refused.status_code == 422, refused.text
    key = service("POST", "/workloads", json={"entry": "zoo:synthetic"}, headers={"Idempotency-Key": ascii(text)})
    assert key.status_code in (201, 422)
    assert service("GET", "/studies").status_code == 200
    content = service("GET", f"/studies/{study['study_id']}").headers
    assert (content["content-type"], content["x-content-type-options"]) == ("application/json", "nosniff")


def test_a_large_upload_is_refused_by_its_announced_length_without_being_read(service: Served) -> None:
    sent = 0

    def gigabyte() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1 << 10):
            sent += 1 << 20
            yield b"\0" * (1 << 20)

    headers = {"Content-Type": "multipart/form-data; boundary=x", "Content-Length": str(1 << 30)}
    answer = service("POST", "/workloads", content=gigabyte(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["code"] == "content-too-large"


@pytest.mark.parametrize("length", ["many", "-1", "1e9", "1 2", ""])
def test_a_length_that_is_none_is_a_malformed_request(service: Served, length: str) -> None:
    """To operations without a body, too; it was refused as one that is too large."""
    answer = service("GET", "/me", headers={"Content-Length": length})
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed-length")


def test_what_takes_no_body_refuses_a_large_one_as_documented(service: Served) -> None:
    answer = service("GET", "/me", headers={"Content-Length": str(1 << 40)})
    assert answer.status_code == 413
    document = service("GET", "/openapi.json").json()
    assert "413" in document["paths"]["/api/v1/me"]["get"]["responses"]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_upload_without_a_length_is_refused_once_it_is_too_large(service: Served, anyio_backend) -> None:
    """A gigabyte in chunks: no more than the limit is ever read."""
    received = 0
    opening = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.zip"\r\n\r\n'

    async def receive() -> dict:
        nonlocal received
        chunk = opening if received == 0 else b"\0" * (1 << 16)
        received += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": received < 1 << 30}

    status = []

    async def send(message: dict) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    token = service.token()
    headers = [(b"authorization", f"Bearer {token}".encode()), (b"content-type", b"multipart/form-data; boundary=x")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": f"{API}/workloads",
        "raw_path": f"{API}/workloads".encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"service"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("service", 80),
    }
    await service.app(scope, receive, send)
    assert status == [413]
    assert received < 2 << 20


@pytest.mark.parametrize("path", ["/studies", "/workloads/abc", "/session"])
def test_a_form_that_is_sent_elsewhere_may_be_as_large_as_any_body(service: Served, path: str) -> None:
    """Bodies that are not uploads are read into memory, before it is known whose they are."""
    length = service.services.settings.max_body_bytes + 1
    headers = {"Content-Type": "multipart/form-data; boundary=x", "Content-Length": str(length)}
    answer = service.http.post(f"{API}{path}", content=iter([b"--x"]), headers=headers)
    assert answer.status_code == 413


def test_a_stranger_cannot_make_the_service_read_an_upload(service: Served) -> None:
    sent = []

    def content() -> Iterator[bytes]:
        for _ in range(16):
            sent.append(1)
            yield b"\0" * (1 << 15)

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert service.http.post(f"{API}/workloads", content=content(), headers=headers).status_code == 401


def test_a_deeply_nested_body_is_refused(service: Served) -> None:
    body = b'{"workload":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    answer = service("POST", "/studies", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    large = service("POST", "/studies", content=b" " * (2 << 20), headers={"Content-Type": "application/json"})
    assert large.status_code == 413
