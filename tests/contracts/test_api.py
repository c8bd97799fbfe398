"""The conventions of the REST interface: pages, problems, retries, versions, ids, headers, limits."""

import ast
import base64
import csv
import gzip
import io
import json
import logging
import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from api_builders import API, LOG, TRACE, Served, fill, served, sqlite_url
from sqlalchemy import update

from steptune.service.api import artifacts
from steptune.service.api import studies as studies_api
from steptune.service.api.middleware import SAFETY_HEADERS
from steptune.service.api.problems import MEDIA_TYPE
from steptune.service.connections import writing
from steptune.service.models import IdempotencyKeyRow, QueueEntryRow, WorkerRow
from steptune.service.store import SqlStudyStore
from steptune.service.uploads import UPLOADS_AT_ONCE
from steptune.tuner.export import EXPORTERS
from steptune.tuner.records import StudyState

METRICS = {"Authorization": "Bearer open sesame"}
WORKLOAD = "from steptune import Workload\n\nclass Mine(Workload):\n    pass\n"


@pytest.fixture(params=["sqlite", "postgresql"])
def service(request, tmp_path) -> Iterator[Served]:
    url = sqlite_url(tmp_path) if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with served(url, tmp_path) as found:
        yield found


@pytest.fixture
def quick(tmp_path) -> Iterator[Served]:
    """Where the database makes no difference."""
    with served(sqlite_url(tmp_path), tmp_path, metrics_token="open sesame") as found:
        yield found


def problem(answer, status: int, code: str) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE
    found = answer.json()
    assert (found["status"], found["code"]) == (status, code)
    assert found["type"] == f"urn:steptune:problem:{code}"
    assert found["request_id"] == answer.headers["x-request-id"]
    return found


# --- studies ------------------------------------------------------------------------------------


def test_a_submitted_study_waits_and_can_be_read_where_the_answer_says(service: Served) -> None:
    answer = service("POST", "/studies", json={"workload": "zoo:synthetic", "title": "first", "budget_s": 60})
    assert answer.status_code == 201
    study = service.http.get(answer.headers["location"], headers={"Authorization": f"Bearer {service.token()}"}).json()
    assert study == answer.json()
    assert (study["state"], study["title"], study["settings"]["budget_s"]) == ("queued", "first", 60)
    assert "worker" in study["queue"]["waits_for"]


def test_reservations_say_who_holds_which_hosts_and_who_waits_for_what(quick: Served) -> None:
    first, second = (quick.submit()["study_id"] for _ in range(2))
    engine = quick.services.engine
    with writing(engine) as session:
        entry = session.get_one(QueueEntryRow, first)
        entry.lease_until = datetime.now(UTC) + timedelta(minutes=1)
        entry.place, entry.claimed_at = "one core 0 and two", entry.queued_at
    SqlStudyStore(engine).set_state(first, StudyState.RUNNING)
    held, waiting = quick("GET", "/reservations").json()["items"]
    assert (held["study_id"], held["holds"], held["hosts"], held["waits_for"]) == (first, True, ["one", "two"], "")
    assert (waiting["study_id"], waiting["holds"], waiting["hosts"]) == (second, False, [])
    assert waiting["waits_for"].startswith("a worker")
    assert quick("GET", "/reservations", user="eve").json()["items"] == []
    page = quick.http.get("/fleet", headers={"Authorization": f"Bearer {quick.token('ada')}"}).text
    assert "one, two" in page
    assert waiting["waits_for"].partition(":")[0] in page


def test_a_running_study_whose_worker_died_says_what_it_waits_for(quick: Served) -> None:
    study_id, _ = fill(quick, state=StudyState.RUNNING)
    for minutes, waits_for in ((1, ""), (-1, "a worker (none is running: start one with `steptune worker`)")):
        with writing(quick.services.engine) as session:
            entry = session.get_one(QueueEntryRow, study_id)
            entry.lease_until = datetime.now(UTC) + timedelta(minutes=minutes)
        assert quick("GET", f"/studies/{study_id}").json()["queue"]["waits_for"] == waits_for


def test_what_the_engine_honours_reaches_it(quick: Served) -> None:
    limit = 1 << 30
    study = quick.submit(
        constraints={"memory_limit_bytes": limit}, device="cpu", seed=7, allow=["lossy"], only=["compile"]
    )
    settings = study["settings"]
    assert settings["memory_limit_bytes"] == limit
    assert (settings["device"], settings["seed"], settings["allow"], settings["only"]) == (
        "cpu",
        7,
        ["lossy"],
        ["compile"],
    )


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"workload": "zoo:synthetic", "objective": "latency"}, "/objective"),
        ({"workload": "zoo:synthetic", "objective": "steps:0"}, "/objective"),
        ({"workload": "zoo:synthetic", "objective": "energy", "device": "cpu"}, ""),
        ({"workload": "zoo:synthetic", "budget": 5}, "/budget"),
        ({"workload": "zoo:synthetic", "seed": True}, "/seed"),
        ({"workload": "zoo:synthetic", "constraints": {"memory_limit_bytes": 1}}, "/constraints/memory_limit_bytes"),
        ({"workload": "zoo:synthetic", "title": "a\u0000b"}, "/title"),
        ({}, ""),
        ({"workload": "zoo:synthetic", "workload_id": "abc"}, ""),
        ({"workload": "zoo:synthetic", "num_ranks": 2}, ""),
        ({"workload": "zoo:synthetic", "num_ranks": 3, "num_hosts": 2, "device": "cpu"}, ""),
    ],
)
def test_a_wrong_field_is_named_by_its_pointer(quick: Served, body, pointer) -> None:
    found = problem(quick("POST", "/studies", json=body), 422, "invalid-request")
    assert pointer in [error["pointer"] for error in found["errors"]]


def test_a_strategy_or_zoo_entry_that_does_not_exist_is_refused(quick: Served) -> None:
    unknown = problem(
        quick("POST", "/studies", json={"workload": "zoo:synthetic", "only": ["magic"]}), 422, "invalid-request"
    )
    assert "magic" in unknown["detail"]
    both = {"workload": "zoo:synthetic", "only": ["compile"], "skip": ["compile"]}
    assert "compile" in problem(quick("POST", "/studies", json=both), 422, "invalid-request")["detail"]
    problem(quick("POST", "/studies", json={"workload": "zoo:none"}), 422, "invalid-workload")


@pytest.mark.parametrize("path", ["/etc/passwd.py:A", "train.py:A", "../../train.py:A", "a/b:C"])
def test_files_of_the_server_cannot_be_named(quick: Served, path: str) -> None:
    found = problem(quick("POST", "/studies", json={"workload": path}), 422, "invalid-workload")
    assert "upload" in found["detail"]


def test_another_users_things_are_not_there(service: Served) -> None:
    study_id, trial_ids = fill(service, user="ada")
    workload_id = service("POST", "/workloads", json={"entry": "zoo:synthetic"}).json()["workload_id"]
    artifact_id = service("GET", f"/studies/{study_id}/artifacts").json()["items"][0]["artifact_id"]
    paths = [
        f"/studies/{study_id}",
        *(f"/studies/{study_id}/{part}" for part in ("trials", "findings", "decisions", "recommendation", "exports")),
        *(
            f"/studies/{study_id}/{part}"
            for part in ("artifacts", "events", "exports/yaml", "optuna", "trials?format=csv")
        ),
        f"/trials/{trial_ids[0]}",
        *(f"/trials/{trial_ids[0]}/{part}" for part in ("windows", "breakdown", "gaps", "kernels", "collectives")),
        *(f"/trials/{trial_ids[0]}/{part}" for part in ("findings", "guard", "timeline", "logs", "artifacts", "trace")),
        *(f"/trials/{trial_ids[0]}/{part}" for part in ("lanes", "spans?name=gemm")),
        f"/workloads/{workload_id}",
        f"/artifacts/{artifact_id}",
    ]
    for path in paths:
        assert service("GET", path, user="ada").status_code == 200, path
        assert service("GET", path, user="eve").status_code == 404, path
        assert service("GET", path, user="root", scopes="admin").status_code == 200, path
    for method, path in (("DELETE", paths[0]), ("POST", f"{paths[0]}/cancel"), ("DELETE", f"/workloads/{workload_id}")):
        assert service(method, path, user="eve").status_code == 404
    assert service("PATCH", paths[0], user="eve", json={"title": "mine"}).status_code == 404
    problem(service("POST", "/studies", user="eve", json={"workload_id": workload_id}), 404, "workload-not-found")
    assert service("GET", "/studies", user="eve").json()["items"] == []
    assert service("GET", "/events", user="eve").json()["items"] == []
    assert len(service("GET", "/studies", user="root", scopes="admin").json()["items"]) == 1


def test_a_study_is_paused_resumed_cancelled_and_deleted(service: Served) -> None:
    study_id = service.submit()["study_id"]
    assert service("POST", f"/studies/{study_id}/pause").json()["state"] == "paused"
    assert service("POST", f"/studies/{study_id}/resume").json()["state"] == "queued"
    assert service("POST", f"/studies/{study_id}/cancel").json()["state"] == "cancelled"
    problem(service("POST", f"/studies/{study_id}/resume"), 409, "state-conflict")
    assert service("DELETE", f"/studies/{study_id}").status_code == 204
    problem(service("GET", f"/studies/{study_id}"), 404, "study-not-found")


ACTIONS = [("POST", "/cancel"), ("POST", "/pause"), ("POST", "/resume"), ("DELETE", ""), ("PATCH", "")]


@pytest.mark.parametrize(("method", "action"), ACTIONS)
def test_who_loses_a_race_for_a_version_is_refused(service: Served, method: str, action: str, monkeypatch) -> None:
    """Somebody else changes the study after its version was looked at, before it is changed."""
    study_id = service.submit()["study_id"]
    tag = service("GET", f"/studies/{study_id}").headers["etag"]
    found = studies_api.check_version

    def overtaken(wanted: str | None, version: int) -> int | None:
        service.services.queue.pause(study_id)
        return found(wanted, version)

    monkeypatch.setattr(studies_api, "check_version", overtaken)
    body = {"json": {"title": "lost"}} if method == "PATCH" else {}
    answer = service(method, f"/studies/{study_id}{action}", headers={"If-Match": tag}, **body)
    problem(answer, 412, "changed-meanwhile")
    now = service("GET", f"/studies/{study_id}").json()
    assert (now["state"], now["title"]) == ("paused", "")
    monkeypatch.undo()
    assert service(method, f"/studies/{study_id}{action}", **body).status_code in (200, 202, 204)


@pytest.mark.parametrize("content", ["", "csrf_token=x"])
def test_an_action_takes_the_form_that_curl_sends(quick: Served, content: str) -> None:
    path = f"/studies/{quick.submit()['study_id']}/pause"
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Idempotency-Key": "form"}
    for _ in range(2):
        assert quick("POST", path, content=content, headers=headers).json()["state"] == "paused"


def test_studies_are_listed_by_state_owner_workload_and_hardware(service: Served) -> None:
    study_id, _ = fill(service)
    queued = service.submit()["study_id"]
    study = service("GET", f"/studies/{study_id}").json()

    def found(**filters) -> list[str]:
        return [item["study_id"] for item in service("GET", "/studies", params=filters).json()["items"]]

    assert found() == [queued, study_id]
    assert found(state="completed") == [study_id]
    assert found(hardware=study["hardware_fingerprint"]) == [study_id]
    assert found(workload=study["workload"]) == [study_id]
    assert found(owner=service.user_id("ada")) == [queued, study_id]
    assert found(owner="somebody") == []


# --- pages --------------------------------------------------------------------------------------


def test_pages_hold_every_study_once_while_others_are_added(service: Served) -> None:
    submitted = [service.submit()["study_id"] for _ in range(5)]
    seen, cursor = [], None
    while True:
        page = service("GET", "/studies", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        assert len(page["items"]) <= 2
        seen += [item["study_id"] for item in page["items"]]
        cursor = page["next_cursor"]
        service.submit()
        if cursor is None:
            break
    assert seen == submitted[::-1]


@pytest.mark.parametrize("part", ["trials", "findings", "decisions", "artifacts", "events"])
def test_pages_below_a_study_are_the_whole_list_in_pieces(quick: Served, part: str) -> None:
    study_id, _ = fill(quick)
    path = f"/studies/{study_id}/{part}"
    whole = quick("GET", path).json()["items"]
    assert len(whole) > 1 or part == "findings"
    pieces, cursor = [], None
    for _ in whole:
        page = quick("GET", path, params={"limit": 1, **({"cursor": cursor} if cursor else {})}).json()
        pieces += page["items"]
        cursor = page["next_cursor"]
    assert pieces == whole
    assert cursor is None


LONG_PAIR = base64.urlsafe_b64encode(f"1:{'9' * 30}.1".encode()).decode()


@pytest.mark.parametrize("cursor", ["x", "", "MQ", "MTo", "MTonOyBkcm9w", "é", "MTphLmI=", LONG_PAIR])
def test_what_is_not_a_cursor_is_refused(quick: Served, cursor: str) -> None:
    study_id, _ = fill(quick)
    for path in (f"/studies/{study_id}/trials", f"/studies/{study_id}/findings"):
        problem(quick("GET", path, params={"cursor": cursor}), 400, "invalid-cursor")


@pytest.mark.parametrize("number", ["0" * 20 + "9" * 30, "9" * 19, str(1 << 63), "-1", "x"])
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_what_is_not_an_events_number_is_refused(quick: Served, number: str, accept: str) -> None:
    headers = {"Last-Event-ID": number, "Accept": accept}
    problem(quick("GET", "/events", headers=headers), 400, "invalid-last-event-id")


@pytest.mark.parametrize("limit", ["0", "201", "-1", "many"])
def test_a_page_has_at_most_200_items(quick: Served, limit: str) -> None:
    found = problem(quick("GET", "/studies", params={"limit": limit}), 422, "invalid-request")
    assert found["errors"][0]["pointer"] == "query/limit"


# --- problems -----------------------------------------------------------------------------------


def test_every_refusal_is_a_problem(quick: Served) -> None:
    problem(quick.http.get("/nowhere"), 404, "not-found")
    wrong_method = quick.http.put(f"{API}/studies")
    problem(wrong_method, 405, "method-not-allowed")
    assert wrong_method.headers["allow"] == "GET, POST"
    problem(
        quick("POST", "/studies", content=b"{", headers={"Content-Type": "application/json"}), 400, "malformed-json"
    )
    problem(
        quick("POST", "/studies", content=b"a=b", headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type"
    )
    problem(
        quick("POST", "/workloads", content=b"a", headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type"
    )
    problem(quick.http.get(f"{API}/studies"), 401, "not-authenticated")


def test_a_mistake_of_ours_says_nothing_but_the_requests_id(quick: Served, caplog) -> None:
    @quick.app.get("/broken")
    def broken() -> None:
        raise RuntimeError("the secret is a password")

    with caplog.at_level(logging.ERROR, logger="steptune"):
        answer = quick.http.get("/broken")
    found = problem(answer, 500, "internal-error")
    assert "password" not in answer.text
    assert [record.fields["request_id"] for record in caplog.records if record.exc_info] == [found["request_id"]]


def test_a_database_that_cannot_be_used_is_a_503_without_its_name(quick: Served, tmp_path) -> None:
    quick.token()
    quick.services.engine.dispose()
    (tmp_path / "steptune.db").write_bytes(b"this is not a database any more" * 200)
    answer = quick("GET", "/studies")
    problem(answer, 503, "database-unavailable")
    assert str(tmp_path) not in answer.text
    assert quick.http.get("/healthz").status_code == 200
    problem(quick.http.get("/readyz"), 503, "not-ready")


# --- retries ------------------------------------------------------------------------------------


def test_a_retry_gets_the_first_answer(service: Served) -> None:
    body, headers = {"workload": "zoo:synthetic"}, {"Idempotency-Key": "abc"}
    first = service("POST", "/studies", json=body, headers=headers)
    again = service("POST", "/studies", json=body, headers=headers)
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["idempotent-replayed"] == "true"
    other = service("POST", "/studies", json={**body, "seed": 1}, headers=headers)
    problem(other, 422, "idempotency-key-reused")
    assert service("POST", "/studies", user="bob", json=body, headers=headers).json() != first.json()
    assert len(service("GET", "/studies").json()["items"]) == 1


def _retries(service: Served, count: int) -> None:
    def send(_: int) -> int:
        headers = {"Idempotency-Key": "one"}
        return service("POST", "/studies", json={"workload": "zoo:synthetic"}, headers=headers).status_code

    service.token()
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(send, range(count)))
    assert set(statuses) <= {201, 409}
    assert 201 in statuses
    assert len(service("GET", "/studies").json()["items"]) == 1


def test_hundreds_of_retries_at_once_make_one_study(service: Served) -> None:
    _retries(service, 200)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_thousand_retries_make_one_study(service: Served) -> None:
    _retries(service, 10_000)


def test_a_refused_request_frees_its_key(quick: Served) -> None:
    headers = {"Idempotency-Key": "abc"}
    problem(quick("POST", "/studies", json={"workload": "zoo:none"}, headers=headers), 422, "invalid-workload")
    again = quick("POST", "/studies", json={"workload": "zoo:synthetic"}, headers=headers)
    assert again.status_code == 201


def test_a_retry_after_a_crash_finds_what_was_made(service: Served) -> None:
    """The process died after the work and before the answer was kept."""
    body, headers = {"workload": "zoo:synthetic"}, {"Idempotency-Key": "abc"}
    first = service("POST", "/studies", json=body, headers=headers).json()
    died = datetime.now(UTC) - timedelta(minutes=1)
    with writing(service.services.engine) as session:
        lost = {"status": None, "body": None, "headers": first["study_id"], "created_at": datetime.now(UTC)}
        session.execute(update(IdempotencyKeyRow).values(**lost))
    answer = service("POST", "/studies", json=body, headers=headers)
    problem(answer, 409, "request-in-progress")
    assert answer.headers["retry-after"]
    with writing(service.services.engine) as session:
        session.execute(update(IdempotencyKeyRow).values(created_at=died))
    assert service("POST", "/studies", json=body, headers=headers).json()["study_id"] == first["study_id"]


# --- versions -----------------------------------------------------------------------------------


def test_an_unchanged_thing_is_not_sent_again(quick: Served) -> None:
    study_id = quick.submit()["study_id"]
    for path in (f"/studies/{study_id}", "/studies", "/me"):
        tag = quick("GET", path).headers["etag"]
        again = quick("GET", path, headers={"If-None-Match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert quick("GET", path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_file_that_the_client_has_is_not_sent_again(quick: Served) -> None:
    study_id, trial_ids = fill(quick)
    number = quick("GET", f"/studies/{study_id}/artifacts").json()["items"][0]["artifact_id"]
    for path in (f"/artifacts/{number}", f"/trials/{trial_ids[0]}/trace"):
        tag = quick("GET", path).headers["etag"]
        again = quick("GET", path, headers={"If-None-Match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)


def test_an_accepted_action_says_where_and_when_to_look(quick: Served) -> None:
    study_id = quick.submit()["study_id"]
    for action in ("pause", "resume", "cancel"):
        for _ in range(2):
            answer = quick("POST", f"/studies/{study_id}/{action}", headers={"Idempotency-Key": action})
            assert answer.headers["location"] == f"{API}/studies/{study_id}"
            assert int(answer.headers["retry-after"]) > 0


def test_a_user_is_made_once(quick: Served) -> None:
    body, headers = {"name": "new", "scopes": ["read"]}, {"Idempotency-Key": "user"}
    first, again = (quick("POST", "/users", user="root", scopes="admin", json=body, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()


def test_places_are_below_the_base_path(tmp_path, recwarn) -> None:
    with served(sqlite_url(tmp_path), tmp_path, base_path="/steptune") as service:
        bodies = {
            "users": {"name": "new", "scopes": ["read"]},
            "tokens": {"scopes": ["read"]},
            "studies": {"workload": "zoo:synthetic"},
        }
        for name, body in bodies.items():
            answer = service("POST", f"/{name}", user="root", scopes="admin", json=body)
            assert answer.headers["location"].startswith(f"/steptune{API}/{name}/")
            headers = {"Authorization": f"Bearer {service.token('root')}"}
            assert service.http.get(answer.headers["location"], headers=headers).status_code == 200
    assert [str(warning.message) for warning in recwarn if "root_path" in str(warning.message)] == []


def test_a_change_of_an_old_version_is_refused(service: Served) -> None:
    study_id = service.submit()["study_id"]
    path = f"/studies/{study_id}"
    tag = service("GET", path).headers["etag"]
    changed = service("PATCH", path, json={"title": "new", "priority": 5}, headers={"If-Match": tag})
    assert (changed.json()["title"], changed.json()["priority"]) == ("new", 5)
    problem(service("PATCH", path, json={"title": "newer"}, headers={"If-Match": tag}), 412, "changed-meanwhile")
    problem(service("DELETE", path, headers={"If-Match": tag}), 412, "changed-meanwhile")
    assert service("PATCH", path, json={"title": "newest"}).json()["priority"] == 5
    assert service("DELETE", path, headers={"If-Match": "*"}).status_code == 204


# --- headers, logs, health ----------------------------------------------------------------------


def test_a_request_keeps_its_id_and_is_logged_without_its_query(quick: Served, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="steptune"):
        answer = quick("GET", "/studies", params={"workload": "my-secret"}, headers={"X-Request-ID": "me-1"})
    assert answer.headers["x-request-id"] == "me-1"
    fields = caplog.records[-1].fields
    assert (fields["request_id"], fields["path"], fields["route"]) == ("me-1", f"{API}/studies", f"{API}/studies")
    assert "my-secret" not in json.dumps(fields)
    assert quick.http.get("/healthz", headers={"X-Request-ID": "a b\tc"}).headers["x-request-id"] != "a b\tc"


def test_every_answer_is_safe_in_a_browser(quick: Served) -> None:
    _, trial_ids = fill(quick)
    answers = quick("GET", "/studies"), quick.http.get("/nowhere"), quick("GET", f"/trials/{trial_ids[0]}/trace")
    for answer in answers:
        assert [name for name in SAFETY_HEADERS if name.lower() not in answer.headers] == []
        assert "unsafe-inline" not in answer.headers["content-security-policy"].partition("style-src")[0]
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_metrics_count_requests_by_operation_and_studies_by_state(quick: Served) -> None:
    study_id = quick.submit()["study_id"]
    quick("GET", f"/studies/{study_id}")
    text = quick.http.get("/metrics", headers=METRICS).text
    assert f'steptune_http_requests_total{{method="GET",route="{API}/studies/{{study_id}}",status="200"}} 1.0' in text
    assert 'steptune_studies{state="queued"} 1.0' in text
    assert 'steptune_workers{state="idle"} 0.0' in text
    assert study_id not in text


def test_metrics_count_workers_as_they_are_and_not_as_they_last_said(quick: Served) -> None:
    """One that was killed says nothing any more."""
    now = datetime.now(UTC)
    fields = {"name": "", "host_id": "", "device_kind": "cpu", "devices": "[]", "isolation": "", "version": ""}
    with writing(quick.services.engine) as session:
        for name, state, seconds in (("alive", "busy", 1), ("killed", "busy", 3600), ("left", "gone", 1)):
            at = now - timedelta(seconds=seconds)
            session.add(WorkerRow(worker_id=name, state=state, started_at=at, heartbeat_at=at, **fields))
    text = quick.http.get("/metrics", headers=METRICS).text
    assert 'steptune_workers{state="busy"} 1.0' in text
    assert 'steptune_workers{state="gone"} 2.0' in text


def test_metrics_are_shown_to_who_has_their_token_only(tmp_path) -> None:
    with served(sqlite_url(tmp_path), tmp_path, metrics_token="open sesame") as service:
        assert service.http.get("/metrics").status_code == 401
        assert service("GET", "/../../metrics").status_code in (401, 404)
        assert service.http.get("/metrics", headers={"Authorization": "Bearer open sesame"}).status_code == 200


# --- what a study found -------------------------------------------------------------------------


def test_a_recommendation_comes_in_the_form_that_is_asked_for(quick: Served) -> None:
    study_id, _ = fill(quick)
    path = f"/studies/{study_id}/recommendation"
    for accept, expected in {
        "*/*": "application/json",
        "application/yaml": "application/yaml",
        "text/x-python;q=0.5, application/yaml;q=0.4": "text/x-python",
        "application/*": "application/json",
    }.items():
        assert quick("GET", path, headers={"Accept": accept}).headers["content-type"].startswith(expected)
    problem(quick("GET", path, headers={"Accept": "image/png, application/json;q=0"}), 406, "not-acceptable")
    named = quick("GET", path, params={"format": "yaml"})
    assert named.text == quick("GET", f"/studies/{study_id}/exports/yaml").text
    problem(quick("GET", f"/studies/{quick.submit()['study_id']}/recommendation"), 404, "recommendation-not-found")


@pytest.mark.parametrize("name", [exporter.name for exporter in EXPORTERS])
def test_every_format_is_listed_and_can_be_saved(quick: Served, name: str) -> None:
    study_id, _ = fill(quick)
    listed = {item["name"]: item for item in quick("GET", f"/studies/{study_id}/exports").json()["items"]}
    answer = quick("GET", f"/studies/{study_id}/exports/{name}")
    if name == "accelerate_fsdp1":  # nothing is sharded
        assert name not in listed
        assert "export accelerate" in problem(answer, 409, "not-expressible")["detail"]
        return
    assert answer.status_code == 200
    assert answer.headers["content-disposition"] == f'attachment; filename="{listed[name]["file_name"]}"'
    assert answer.headers["content-type"].startswith(listed[name]["media_type"])
    assert listed[name]["carries"].startswith("carries ")


def test_the_configuration_of_a_trial_is_exported_in_place_of_the_recommended_one(quick: Served) -> None:
    study_id, trial_ids = fill(quick)
    path = f"/studies/{study_id}/exports"
    exported = quick("GET", f"{path}/json", params={"trial": trial_ids[0]})
    assert exported.json()["candidate"] == quick("GET", f"/trials/{trial_ids[0]}").json()["candidate"]
    assert quick("GET", path, params={"trial": trial_ids[0]}).json()["items"]
    problem(quick("GET", f"{path}/json", params={"trial": "nobody"}), 404, "trial-not-found")


@pytest.mark.parametrize("asked", [{"params": {"format": "csv"}}, {"headers": {"Accept": "text/csv"}}])
def test_trials_come_as_a_table(quick: Served, asked: dict) -> None:
    study_id, trial_ids = fill(quick)
    path = f"/studies/{study_id}/trials"
    answer = quick("GET", path, **asked)
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="trials.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["trial_id"] for row in rows] == trial_ids
    assert [row["state"] for row in rows] == [trial["state"] for trial in quick("GET", path).json()["items"]]
    again = {**asked, "headers": {**asked.get("headers", {}), "If-None-Match": answer.headers["etag"]}}
    assert quick("GET", path, **again).status_code == 304


def test_a_table_has_the_trials_of_one_state_and_all_pages(quick: Served) -> None:
    study_id, trial_ids = fill(quick)
    asked = {"format": "csv", "state": "completed", "limit": 1}
    rows = list(csv.DictReader(io.StringIO(quick("GET", f"/studies/{study_id}/trials", params=asked).text)))
    assert [row["trial_id"] for row in rows] == trial_ids[:1]
    asked = {"format": "csv", "limit": 1}
    assert len(quick("GET", f"/studies/{study_id}/trials", params=asked).text.splitlines()) == 1 + len(trial_ids)


def test_trials_in_no_form_that_there_is_are_refused(quick: Served) -> None:
    study_id, _ = fill(quick)
    refused = quick("GET", f"/studies/{study_id}/trials", headers={"Accept": "image/png"})
    assert "text/csv" in problem(refused, 406, "not-acceptable")["detail"]


def test_parquet_without_its_library_is_refused_with_the_way_out(quick: Served, monkeypatch) -> None:
    study_id, _ = fill(quick)
    monkeypatch.setattr("steptune.tuner.export.trial_table.has_parquet", lambda: False)
    refused = quick("GET", f"/studies/{study_id}/trials", params={"format": "parquet"})
    assert "steptune[parquet]" in problem(refused, 406, "not-acceptable")["detail"]


def test_a_study_comes_as_an_optuna_study(quick: Served, tmp_path) -> None:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    study_id, _ = fill(quick)
    answer = quick("GET", f"/studies/{study_id}/optuna")
    journal = tmp_path / "optuna_study.log"
    journal.write_bytes(answer.content)
    study = optuna.load_study(
        study_name=study_id, storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
    )
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL"]  # the third one still runs
    again = quick("GET", f"/studies/{study_id}/optuna", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304


def test_files_are_saved_and_not_shown(quick: Served) -> None:
    import gzip

    _, trial_ids = fill(quick)
    answer = quick("GET", f"/trials/{trial_ids[0]}/trace")
    assert gzip.decompress(answer.content) == TRACE
    assert answer.headers["content-disposition"].startswith("attachment;")
    assert quick("GET", f"/trials/{trial_ids[0]}/logs").content == LOG
    assert quick("GET", f"/trials/{trial_ids[0]}/logs", params={"tail_bytes": 3}).content == LOG[-3:]
    problem(quick("GET", f"/trials/{trial_ids[2]}/trace"), 404, "trace-not-found")


def test_each_rank_s_trace_is_downloaded_by_its_number(quick: Served) -> None:
    from steptune.service.store import SqlStudyStore

    study_id, trial_ids = fill(quick)
    kept = quick.services.artifacts.put([gzip.compress(b"of rank 1")])
    SqlStudyStore(quick.services.engine).add_artifact(study_id, trial_ids[0], "trace.1", kept.digest, kept.size_bytes)
    found = {
        rank: gzip.decompress(quick("GET", f"/trials/{trial_ids[0]}/trace", params={"rank": rank}).content)
        for rank in (0, 1)
    }
    assert found == {0: TRACE, 1: b"of rank 1"}
    problem(quick("GET", f"/trials/{trial_ids[0]}/trace", params={"rank": 2}), 404, "trace-not-found")


@pytest.mark.parametrize("part", ["trace", "timeline", "logs"])
def test_a_file_that_is_gone_is_not_a_database_that_is_away(quick: Served, part: str) -> None:
    _, trial_ids = fill(quick)
    for file in list(quick.services.artifacts.list()):
        quick.services.artifacts.delete(file.name)
    found = problem(quick("GET", f"/trials/{trial_ids[0]}/{part}"), 410, "file-gone")
    assert quick.services.artifacts.place not in found["detail"]


@pytest.mark.parametrize("num_bytes", [1, 4, 5, 8, 19, 20, 21, 1000])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_end_of_a_log_is_read_in_pieces(num_bytes: int, pack, monkeypatch) -> None:
    monkeypatch.setattr(artifacts, "_CHUNK_BYTES", 4)
    log = bytes(range(20))
    assert artifacts._tail(io.BytesIO(pack(log)), num_bytes) == log[-num_bytes:]


def test_a_timeline_is_read_by_tiles_and_by_names(quick: Served) -> None:
    _, trial_ids = fill(quick)
    path = f"/trials/{trial_ids[0]}"
    whole = quick("GET", f"{path}/lanes").json()
    assert (whole["low_ns"], whole["high_ns"], whole["exact"]) == (0, 100, True)
    second = quick("GET", f"{path}/lanes", params={"level": 1, "tile": 1}).json()
    assert (second["low_ns"], second["high_ns"], second["last_ns"]) == (50, 100, 100)
    assert second["lanes"][0]["names"] == ["relu"]
    [place] = quick("GET", f"{path}/spans", params={"name": "gemm"}).json()["spans"]
    assert place == {"lane": "stream 7", "start_ns": 0, "length_ns": 40}
    assert quick("GET", f"{path}/spans", params={"name": "nothing of it"}).json()["spans"] == []
    problem(quick("GET", f"{path}/lanes", params={"level": 1, "tile": 2}), 404, "tile-not-found")
    problem(quick("GET", f"/trials/{trial_ids[1]}/lanes"), 404, "lanes-not-found")


def test_a_breakdown_sums_to_its_steps(quick: Served) -> None:
    _, trial_ids = fill(quick)
    devices = quick("GET", f"/trials/{trial_ids[0]}/breakdown").json()["devices"]
    for device in devices:
        assert sum(category["ns"] for category in device["categories"]) == device["step_time_ns"]
    assert devices
    assert quick("GET", f"/trials/{trial_ids[2]}/breakdown").json()["devices"] == []


def test_what_is_no_number_is_null(quick: Served) -> None:
    from builders import sample_guard, sample_result, sample_trial
    from msgspec.structs import replace

    from steptune.service.store import SqlStudyStore
    from steptune.tuner.records import TrialState

    study_id, _ = fill(quick, state=StudyState.RUNNING)
    store = SqlStudyStore(quick.services.engine)
    store.begin_trials(
        [replace(sample_trial(), study_id=study_id, trial_id="nan", sequence=9, state=TrialState.RUNNING, result=None)]
    )
    store.complete_trials([sample_result(trial_id="nan", guard=sample_guard(losses=(1.0, float("nan"), float("inf"))))])
    verdict = quick("GET", "/trials/nan/guard").json()["verdict"]
    assert verdict["losses"] == [1.0, None, None]


def test_a_breakdown_that_cannot_be_trusted_says_why(quick: Served) -> None:
    """Its shares are no verdict: who reads only them must see that."""
    from builders import sample_result, sample_trial
    from msgspec.structs import replace

    from steptune.service.store import SqlStudyStore
    from steptune.tuner.records import Finding, TrialState

    study_id, trial_ids = fill(quick, state=StudyState.RUNNING)
    said = "the profile cannot be trusted: the profiler made the step 4.00 times as long"
    bad = Finding(rule="bad_capture", severity="warning", message=said, advice="wait", strategies=(), bound=0.0)
    store = SqlStudyStore(quick.services.engine)
    store.begin_trials(
        [replace(sample_trial(), study_id=study_id, trial_id="bad", sequence=9, state=TrialState.RUNNING, result=None)]
    )
    store.complete_trials([sample_result(trial_id="bad", findings=(bad,))])
    assert quick("GET", "/trials/bad/breakdown").json()["problems"] == [said]
    assert quick("GET", f"/trials/{trial_ids[0]}/breakdown").json()["problems"] == []


# --- workloads ----------------------------------------------------------------------------------


def upload(service: Served, name: str, content: bytes, **fields):
    return service("POST", "/workloads", files={"file": (name, content)}, data=fields)


def archive(files: dict[str, str]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    return target.getvalue()


def test_an_uploaded_file_is_kept_and_a_study_can_name_it(service: Served) -> None:
    answer = upload(service, "mine.py", WORKLOAD.encode())
    assert answer.status_code == 201, answer.text
    workload = answer.json()
    assert (workload["kind"], workload["entry"], workload["size_bytes"]) == ("file", "mine.py:Mine", len(WORKLOAD))
    with service.services.artifacts.open(workload["digest"]) as kept:
        assert kept.read() == WORKLOAD.encode()
    body = {"workload_id": workload["workload_id"]}
    study = service("POST", "/studies", json=body).json()
    assert (study["workload"], study["workload_id"]) == ("mine.py:Mine", workload["workload_id"])
    problem(service("DELETE", f"/workloads/{workload['workload_id']}"), 409, "state-conflict")
    service("DELETE", f"/studies/{study['study_id']}")
    assert service("DELETE", f"/workloads/{workload['workload_id']}").status_code == 204


def test_an_archives_workload_is_found_or_named(quick: Served) -> None:
    one = archive({"code/train.py": WORKLOAD, "code/data.txt": "1"})
    assert upload(quick, "code.zip", one).json()["entry"] == "code/train.py:Mine"
    two = archive({"a.py": WORKLOAD, "b.py": WORKLOAD})
    assert "name one with `entry`" in problem(upload(quick, "two.zip", two), 422, "invalid-workload")["detail"]
    assert upload(quick, "two.zip", two, entry="b.py:Mine?batch=8").json()["entry"] == "b.py:Mine?batch=8"
    problem(upload(quick, "two.zip", two, entry="c.py:Mine"), 422, "invalid-workload")
    colon = problem(upload(quick, "two.zip", two, entry="b.py:Mine?path=a:b"), 422, "invalid-workload")
    assert "%3A" in colon["detail"]
    assert upload(quick, "two.zip", two, entry="b.py:Mine?path=a%3Ab").status_code == 201
    problem(upload(quick, "two.zip", two, entry="../../etc/passwd.py:Other"), 422, "archive-refused")
    problem(upload(quick, "empty.zip", archive({"a.txt": ""})), 422, "invalid-workload")


def test_an_archive_that_leaves_its_folder_is_refused(quick: Served) -> None:
    problem(upload(quick, "evil.zip", archive({"../evil.py": WORKLOAD})), 422, "archive-refused")


def test_a_source_that_is_too_large_to_be_parsed_is_refused(quick: Served, monkeypatch) -> None:
    large = WORKLOAD + "#" * (1 << 18)
    parse = ast.parse

    def only_small(source: Any, *others: Any, **options: Any) -> Any:
        assert not isinstance(source, str | bytes) or len(source) < 1 << 18, "it is parsed"
        return parse(source, *others, **options)  # other threads have sources of their own

    monkeypatch.setattr("ast.parse", only_small)
    for entry in ({}, {"entry": "mine.py:Mine"}):
        for name, content in {"mine.py": large.encode(), "mine.zip": archive({"mine.py": large})}.items():
            found = problem(upload(quick, name, content, **entry), 422, "invalid-workload")
            assert "262,144" in found["detail"]


def test_so_many_uploads_are_unpacked_at_once(quick: Served) -> None:
    """Beside what is kept, and nothing of them is left."""
    space = quick.services.uploads
    folder = quick.services.settings.data_directory / "uploads"
    with ExitStack() as others:
        taken = [others.enter_context(space.taken()) for _ in range(UPLOADS_AT_ONCE)]
        assert {path.parent for path in taken} == {folder.absolute()}
        refused = upload(quick, "mine.py", WORKLOAD.encode())
        assert problem(refused, 503, "too-many-uploads")
        assert int(refused.headers["Retry-After"]) > 0
    assert upload(quick, "mine.py", WORKLOAD.encode()).status_code == 201
    assert not list(folder.iterdir())


def test_what_a_killed_process_left_of_uploads_is_removed(quick: Served) -> None:
    left = quick.services.settings.data_directory / "uploads" / "left"
    left.mkdir(parents=True)
    (left / "upload").write_text("much")
    os.utime(left, (0, 0))
    upload(quick, "mine.py", WORKLOAD.encode())
    assert not left.exists()


def test_a_repeated_upload_is_kept_once(quick: Served) -> None:
    def send(content: bytes):
        headers = {"Idempotency-Key": "file"}
        return quick("POST", "/workloads", files={"file": ("mine.py", content)}, headers=headers)

    first = send(WORKLOAD.encode())
    assert send(WORKLOAD.encode()).json() == first.json()
    problem(send(WORKLOAD.encode() + b"#"), 422, "idempotency-key-reused")


def test_an_upload_says_what_it_is_in_any_case(quick: Served) -> None:
    body = f'--x\r\nContent-Disposition: form-data; name="file"; filename="mine.py"\r\n\r\n{WORKLOAD}\r\n--x--\r\n'
    headers = {"Content-Type": "Multipart/Form-Data; boundary=x"}
    assert quick("POST", "/workloads", content=body, headers=headers).status_code == 201


def test_a_form_without_a_file_is_refused(quick: Served) -> None:
    boundary = {"Content-Type": "multipart/form-data; boundary=x"}
    body = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nmine\r\n--x--\r\n'
    found = problem(quick("POST", "/workloads", content=body, headers=boundary), 422, "invalid-request")
    assert found["errors"][0]["pointer"] == "/file"
    problem(quick("POST", "/workloads", content=b"nothing", headers=boundary), 400, "bad-request")
