"""The OpenAPI document: FastAPI's, with our records as components and problem details as errors.

Messages are msgspec records, which FastAPI does not know: an operation names them with `returns`, and the document
gets their schemas from msgspec, with the descriptions that their fields have in the source.
"""

from __future__ import annotations

import http
import re
import shlex
from typing import Any, get_args, get_origin

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from steptune.service.api.descriptions import field_descriptions, summary_of
from steptune.service.api.problems import MEDIA_TYPE, Problem
from steptune.service.api.security import SESSION_SCHEME
from steptune.tuner.records import Record

INTERFACE_VERSION = "1"
"""Version of the interface, as in its paths (`/api/v1`); the software's version changes with every commit."""
REF = "#/components/schemas/{name}"
BINARY = ("application/vnd.apache.parquet",)
Responses = dict[int | str, dict[str, Any]]

DESCRIPTION = """\
Submit training workloads, follow the search for their fastest configuration, and read its results.

- **Authentication**: `Authorization: Bearer stp_…` (`steptune token create` creates a token).
- **Lists** are returned in pages: pass `next_cursor` as `cursor` until it is null. Most lists begin with the newest
  item; trials, decisions, files and events are in the order in which they were recorded.
- **Errors** are problem details (RFC 9457), `application/problem+json`.
- **Retries**: within 24 hours, a POST with an `Idempotency-Key` is carried out only once, however often it is sent.
- **Changes**: send the `ETag` of a GET as `If-None-Match` (304 if unchanged) or `If-Match` (412 if changed).
- **Numbers** carry their unit in their name. A number that is not finite is null.
"""

_messages: dict[str, type[Record]] = {"Problem": Problem}


def returns(
    message: type[Record],
    description: str,
    *,
    status: int = 200,
    headers: tuple[str, ...] = (),
    other_types: tuple[str, ...] = (),
) -> Responses:
    """Return the description of an operation's successful response.

    Args:
        headers: Headers beyond those that every response has.
        other_types: Media types of its other forms.
    """
    name = _name(message)
    assert _messages.setdefault(name, message) == message, f"two different message types have the name {name}"
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REF.format(name=name)}}}
    content |= {media_type: {"schema": _file_schema(media_type)} for media_type in other_types}
    return {status: {"description": description, "content": content, "headers": _headers(*headers)}}


def returns_file(media_types: tuple[str, ...], description: str) -> Responses:
    """Return the description of a response with a file to download; the file's content is not described."""
    content = {media_type: {"schema": _file_schema(media_type)} for media_type in media_types}
    return {200: {"description": description, "content": content, "headers": _headers("Content-Disposition")}}


def _file_schema(media_type: str) -> dict[str, Any]:
    """Return the schema of a downloaded file: empty for binary files and for JSON and YAML, which clients parse; a
    string for other text.
    """
    parsed = media_type in ("application/json", "application/yaml")
    return {} if parsed or media_type in BINARY else {"type": "string"}


def unchanged() -> Responses:
    return {304: {"description": "The client has this state already (`If-None-Match`)."}}


def refuses(*statuses: int) -> Responses:
    """Return the descriptions of an operation's errors, without those that every operation has."""
    schema = {"$ref": REF.format(name="Problem")}
    return {
        status: {"description": _MEANINGS[status], "content": {MEDIA_TYPE: {"schema": schema}}} for status in statuses
    }


_MEANINGS = {
    400: "The cursor, a header or the body cannot be read.",
    401: "No token, or one that is unknown, expired or revoked.",
    403: "The token lacks the scope that this operation needs, or a quota is used up.",
    404: "The resource does not exist, or belongs to another user.",
    405: "The method is not supported here; `Allow` lists the supported ones.",
    406: "None of the accepted media types is available.",
    408: "The request did not arrive in time.",
    409: "The state of the resource does not allow this operation, or the same request is in progress.",
    410: "The file is recorded, but its content is no longer stored.",
    412: "The resource has changed since the client read it (`If-Match`).",
    413: "The body is larger than the service accepts.",
    415: "The body has a media type that is not accepted here.",
    422: "The request can be read, but is not valid; `errors` names the fields.",
    429: "Too many requests; `Retry-After` says when to try again.",
    500: "Internal server error; the service's log has the details under the request's id.",
    503: "The database cannot be used at the moment; try again.",
    507: "The disk or the database is full.",
}

COMMON = refuses(400, 401, 403, 413, 422, 429, 500, 503)
"""Errors with which any operation may answer."""

_HEADERS = {
    "ETag": "Tag of the state that was read, for `If-None-Match` and `If-Match`.",
    "Location": "Location of the resource.",
    "Retry-After": "Seconds until the next poll.",
    "Content-Disposition": "Suggested name of the file.",
    "X-Request-ID": "Id of the request, given by the client or generated.",
}

_IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "schema": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "description": "ETag of the state that the client has; the answer is 304 if it is unchanged.",
}


def _headers(*names: str) -> dict[str, Any]:
    return {
        name: {"description": _HEADERS[name], "schema": {"type": "string"}} for name in (*names, "ETag", "X-Request-ID")
    }


def document(app: FastAPI) -> dict[str, Any]:
    """Return an application's OpenAPI document, which is generated on the first call and then cached."""
    if app.openapi_schema is None:
        whole = get_openapi(
            title=app.title,
            version=INTERFACE_VERSION,
            openapi_version="3.1.0",
            description=DESCRIPTION,
            routes=app.routes,
            tags=app.openapi_tags,
        )
        whole["components"]["securitySchemes"]["session"] = SESSION_SCHEME
        schemas = whole["components"].setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own errors: ours are problems
            schemas.pop(name, None)
        schemas.update(components())
        whole["components"]["schemas"] = dict(sorted(schemas.items()))
        for path, operations in whole["paths"].items():
            for method, operation in operations.items():
                if "security" in operation:
                    operation["security"] += [{"session": scopes["token"]} for scopes in operation["security"]]
                if "304" in operation["responses"]:
                    operation.setdefault("parameters", []).append(_IF_NONE_MATCH)
                if "requestBody" in operation:
                    operation["responses"] |= {str(status): said for status, said in refuses(415).items()}
                operation["x-codeSamples"] = [{"lang": "Shell", "source": curl_of(path, method, operation, schemas)}]
        app.openapi_schema = whole
    return app.openapi_schema


def curl_of(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return a curl command for the operation; it uses the variables STEPTUNE_URL, STEPTUNE_TOKEN, and ids like
    STUDY_ID.
    """
    url = re.sub(r"{(\w+)}", lambda match: f"${{{match[1].upper()}}}", path)
    words = ["curl", "-sS", f'"${{STEPTUNE_URL}}{url}"']
    if method != "get":
        words[2:2] = ["-X", method.upper()]
    if "security" in operation:
        words += ["-H", '"Authorization: Bearer ${STEPTUNE_TOKEN}"']
    content = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        example = _example(content["application/json"]["schema"], schemas)
        body = msgspec.json.encode(example).decode()
        data = shlex.quote(body).replace("${STEPTUNE_TOKEN}", "'\"${STEPTUNE_TOKEN}\"'")
        words += ["-H", "'Content-Type: application/json'", "-d", data]
    return " ".join(words)


def _example(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """Return an example from the `examples` of a schema, or of its fields; fields without examples are left out."""
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "examples" in schema:
        return schema["examples"][0]
    fields = schema.get("properties", {})
    return {name: field["examples"][0] for name, field in fields.items() if "examples" in field}


def components() -> dict[str, Any]:
    """Return the schemas of all messages and of the records in them."""
    kinds = list(_messages.values())
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    records = {_name(kind): get_origin(kind) or kind for kind in _records_in(kinds)}
    for name, schema in schemas.items():
        kind = records.get(name)
        if kind is not None:
            schema["description"] = summary_of(kind)
            meanings = field_descriptions(kind)
            for field, property_schema in schema.get("properties", {}).items():
                if field in meanings:
                    property_schema["description"] = meanings[field]
    return {name: _with_null_numbers(schema) for name, schema in schemas.items()}


def _records_in(kinds: list[type[Record]]) -> set[type[msgspec.Struct]]:
    """Return every record class to which these classes refer."""
    found: set[type[msgspec.Struct]] = set()

    def visit(kind: Any) -> None:
        if isinstance(kind, msgspec.inspect.StructType):
            if kind.cls in found:
                return
            found.add(kind.cls)
            for field in kind.fields:
                visit(field.type)
        for name in ("item_type", "item_types", "key_type", "value_type", "types"):
            inner = getattr(kind, name, ())
            for one in inner if isinstance(inner, tuple) else (inner,):
                visit(one)

    for kind in kinds:
        visit(msgspec.inspect.type_info(kind))
    return found


def _with_null_numbers(schema: Any) -> Any:
    """Allow null for numbers: losses and rates can be NaN or infinite, which JSON cannot represent."""
    if isinstance(schema, list):
        return [_with_null_numbers(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _with_null_numbers(value) for key, value in schema.items()}
    if changed.get("type") == "number":
        changed["type"] = ["number", "null"]
    return changed


def _name(message: type) -> str:
    """Return the name of a schema, as msgspec writes it: `Page[Event]` is `Page_Event_`."""
    parts = [get_origin(message) or message, *get_args(message)]
    return "_".join(part.__name__ for part in parts) + "_" * (len(parts) > 1)


assert set(_MEANINGS) <= {status.value for status in http.HTTPStatus}
