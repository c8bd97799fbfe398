"""The OpenAPI document: everything is described, every error is declared, examples work, and answers keep to it."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import schemathesis
from api_builders import Served, fill, served, sqlite_url
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from steptune.service.api.openapi import REF
from steptune.service.app import create_app
from steptune.service.settings import Settings

DOCUMENT = create_app(Settings(_env_file=None, database_url="sqlite://")).openapi()
OPERATIONS = [
    (path, method, operation) for path, methods in DOCUMENT["paths"].items() for method, operation in methods.items()
]
NAMES = [operation["operationId"] for _, _, operation in OPERATIONS]
every_operation = pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS, ids=NAMES)
OPEN = {"healthz", "readyz", "metrics", "open_session"}
"""Operations that need no token."""
ADMIN = "read submit worker admin"


# --- the document -------------------------------------------------------------------------------


def test_operations_have_names_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_every_message_and_every_field_of_it_is_described() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    bare = [name for name, schema in schemas.items() if not schema.get("description")]
    bare += [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, meaning in schema.get("properties", {}).items()
        if not meaning.get("description")
    ]
    assert bare == []


@every_operation
def test_an_operation_is_described_with_its_parameters_and_answers(path, method, operation) -> None:
    assert operation["summary"]
    assert operation["description"]
    assert len(operation["tags"]) == 1
    assert [p["name"] for p in operation.get("parameters", []) if not p.get("description")] == []
    assert [status for status, answer in operation["responses"].items() if not answer["description"]] == []


@every_operation
def test_every_error_is_declared_as_a_problem(path, method, operation) -> None:
    errors = {status: answer for status, answer in operation["responses"].items() if int(status) >= 400}
    for answer in errors.values():
        schema = answer["content"]["application/problem+json"]["schema"]
        assert schema == {"$ref": REF.format(name="Problem")}
    if operation["operationId"] not in OPEN:
        assert {"400", "401", "403", "422", "429", "500", "503"} <= errors.keys()
    if "{" in path:
        assert "404" in errors
    if "requestBody" in operation:
        assert {"413", "415"} <= errors.keys()


def test_conditions_are_declared() -> None:
    for path, method, operation in OPERATIONS:
        headers = {p["name"].lower() for p in operation.get("parameters", []) if p["in"] == "header"}
        assert ("if-none-match" in headers) == ("304" in operation["responses"]), (method, path)
        assert ("if-match" in headers) == ("412" in operation["responses"]), (method, path)


def test_every_reference_leads_somewhere() -> None:
    names = re.findall(r'"\$ref": ?"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT))
    assert set(names) <= DOCUMENT["components"]["schemas"].keys()


# --- answers keep to the document ---------------------------------------------------------------

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
NUM_EXAMPLES = 12


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("documented")
    with served(sqlite_url(folder), folder) as found:
        found.token("admin", ADMIN)
        yield found


@pytest.fixture(scope="module")
def document(service: Served) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_asgi("/api/v1/openapi.json", service.app)


@pytest.fixture
def ids(service: Served) -> dict[str, str]:
    """Something that exists for every parameter of a path, and that may be deleted."""
    study_id, trial_ids = fill(service, user="admin")
    workload = service("POST", "/workloads", user="admin", json={"entry": "zoo:synthetic"}).json()
    artifact = service("GET", f"/studies/{study_id}/artifacts", user="admin").json()["items"][0]
    name = f"guest {study_id}"
    guest = service("GET", "/me", user=name).json()
    return {
        "study_id": study_id,
        "trial_id": trial_ids[0],
        "workload_id": workload["workload_id"],
        "fingerprint": service("GET", "/hardware-profiles", user="admin").json()["items"][0]["fingerprint"],
        "artifact_id": artifact["artifact_id"],
        "format": "yaml",
        "user_id": guest["user_id"],
        "token_id": guest["token_id"],
    }


def is_wrong_as_sent(query: Mapping[str, object], operation: Mapping[str, Any]) -> bool:
    """Say whether a query that breaks the document still does when it is sent: as text, in which `[]` is a name."""
    numbers = {p["name"] for p in operation.get("parameters", ()) if "integer" in json.dumps(p["schema"])}
    return all(isinstance(value, str) or (type(value) is int and name in numbers) for name, value in query.items())


def test_a_list_in_place_of_a_name_is_a_name_as_it_is_sent() -> None:
    [operation] = [operation for _, _, operation in OPERATIONS if operation["operationId"] == "list_studies"]
    assert not is_wrong_as_sent({"workload": [[], "\t"]}, operation)
    assert not is_wrong_as_sent({"workload": 5}, operation)
    assert is_wrong_as_sent({"workload": "x" * 10_000, "limit": 0}, operation)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", NAMES)
def test_answers_keep_to_the_document(
    name: str, mode: GenerationMode, service: Served, document: Any, ids: dict[str, str]
) -> None:
    """Generated requests, valid and not: no 5xx, no status, header or field that is not declared."""
    operation = document.find_operation_by_id(name)
    described = OPERATIONS[NAMES.index(name)][2]
    token = service.token("admin", ADMIN)
    existing = {parameter: ids[parameter] for parameter in re.findall(r"{(\w+)}", operation.path)}
    cases = operation.as_strategy(generation_mode=mode)
    if existing:
        cases = cases | operation.as_strategy(generation_mode=mode, path_parameters=existing)

    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def keeps_to_the_document(case: schemathesis.Case) -> None:
        request = case.as_transport_kwargs(base_url="http://service")
        request.pop("cookies")
        if isinstance(request.get("data"), bytes):
            request["content"] = request.pop("data")
        if request.get("files"):  # forms carry text and bytes: numbers are sent as they are written
            request["files"] = [
                (name, (file, content if isinstance(content, str | bytes) else str(content), *more))
                for name, (file, content, *more) in request["files"]
            ]
        request["headers"] = {**dict(request["headers"]), "Authorization": f"Bearer {token}"}
        checks = CHECKS if is_wrong_as_sent(case.query or {}, described) else CHECKS[:-1]
        case.validate_response(service.http.request(**request), checks=checks)

    try:
        keeps_to_the_document()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "there must be a request that is right"
        assert not [*operation.body, *existing], "something about it can be wrong"
