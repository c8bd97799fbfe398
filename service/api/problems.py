"""Errors as problem details (RFC 9457): one form for every refusal by any part of the service.

An endpoint raises `RefusalError`, or lets an error of `tuner.errors` pass; nothing else becomes text for a client.
What is not expected is a 500 that says nothing but the request's id, under which the log has it.
"""

from __future__ import annotations

import http
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from steptune.service.access.errors import AccessError
from steptune.service.artifacts.store import ArtifactGoneError, ArtifactTooLargeError
from steptune.tuner.errors import (
    ArchiveRefusedError,
    ChoiceError,
    QuotaExceededError,
    StateConflictError,
    SteptuneError,
    StorageFullError,
    StoreError,
    StudyNotFoundError,
    VersionConflictError,
    WorkloadError,
)
from steptune.tuner.records import Record

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:steptune:problem:"


class ProblemField(Record):
    """A single mistake in a request.

    Attributes:
        pointer: JSON pointer into the body ("/budget_s"); for other parts of the request, their kind and name
            ("query/limit").
        message: What is wrong with it.
        code: The kind of mistake, for programs.
    """

    pointer: str
    message: str
    code: str


class Problem(Record):
    """Problem details of a refused request (RFC 9457).

    Attributes:
        type: A URN of the problem's kind.
        title: Human-readable name of the kind.
        status: The HTTP status.
        detail: What was violated, the value, and the way out.
        instance: The requested path.
        code: The kind, for programs: the last part of `type`.
        request_id: Id under which the service logged the request; also the header X-Request-ID.
        errors: Each field that is wrong.
        context: Further details for programs: the required scope, the exhausted quota.
    """

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    errors: tuple[ProblemField, ...] = ()
    context: dict[str, Any] = msgspec.field(default_factory=dict)


class RefusalError(HTTPException, SteptuneError):
    """Refusal of a request. FastAPI lets an `HTTPException` through wherever it is raised.

    Args:
        status: HTTP status.
        code: The kind of problem: lower case, words joined by hyphens.
        detail: Human-readable detail: what was violated, the value, the way out.
        headers: Headers beyond those of every response, such as `Retry-After`.
        errors: Each field that is wrong.
        context: Further details for programs.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[ProblemField] = (),
        context: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status, detail, headers)
        self.code = code
        self.errors = tuple(errors)
        self.context = dict(context or {})


def not_found(what: str, identity: str) -> RefusalError:
    """Build the refusal for an id that does not exist or belongs to another user: the two look the same."""
    return RefusalError(
        404, f"{what}-not-found".replace(" ", "-"), f"there is no {what} {identity!r}, or it is not yours"
    )


def problem_bytes(refusal: RefusalError, path: str, request_id: str) -> bytes:
    """Return the body of a refusal."""
    problem = Problem(
        type=f"{TYPE_PREFIX}{refusal.code}",
        title=http.HTTPStatus(refusal.status_code).phrase,
        status=refusal.status_code,
        detail=refusal.detail,
        instance=path,
        code=refusal.code,
        request_id=request_id,
        errors=refusal.errors,
        context=refusal.context,
    )
    return msgspec.json.encode(problem)


def problem_response(request: Request, refusal: RefusalError) -> Response:
    body = problem_bytes(refusal, request.url.path, request.scope.get("steptune.request_id", ""))
    return Response(body, refusal.status_code, refusal.headers, MEDIA_TYPE)


def add_handlers(app: FastAPI) -> None:
    """Answer every error of the application with problem details."""

    @app.exception_handler(RefusalError)
    async def refused(request: Request, error: RefusalError) -> Response:
        return problem_response(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return problem_response(request, _refusal_of_validation(request, error))

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> Response:
        return problem_response(request, _refusal_of_http(request, error))

    @app.exception_handler(AccessError)
    async def no_access(request: Request, error: AccessError) -> Response:
        refusal = RefusalError(error.status, error.code, error.detail, headers=error.headers, context=error.members)
        return problem_response(request, refusal)

    for kind in KNOWN_ERRORS:
        app.add_exception_handler(kind, known_error)


_STATUS_OF_ERROR: dict[type[Exception], tuple[int, str]] = {
    VersionConflictError: (412, "changed-meanwhile"),
    StateConflictError: (409, "state-conflict"),
    QuotaExceededError: (403, "quota-exceeded"),
    ArchiveRefusedError: (422, "archive-refused"),
    ArtifactTooLargeError: (413, "content-too-large"),
    StudyNotFoundError: (404, "study-not-found"),
    WorkloadError: (422, "invalid-workload"),
    ChoiceError: (422, "invalid-choice"),
    ArtifactGoneError: (410, "file-gone"),
    StorageFullError: (507, "storage-full"),
    StoreError: (503, "database-unavailable"),
}
"""Status and code by class of error; the first class that matches is used."""
KNOWN_ERRORS = tuple(_STATUS_OF_ERROR)


async def known_error(request: Request, error: Exception) -> Response:
    status, code = next(found for kind, found in _STATUS_OF_ERROR.items() if isinstance(error, kind))
    if status >= 500:  # its text may name paths and hosts
        request.scope["steptune.error"] = error
        detail = "the service cannot reach or write its database or its files at the moment; try again"
        return problem_response(request, RefusalError(status, code, detail, headers={"Retry-After": "5"}))
    if isinstance(error, ArtifactGoneError):
        request.scope["steptune.error"] = error
        detail = "the file is recorded, but its content is not in the artifact store: it was deleted or moved"
        return problem_response(request, RefusalError(status, code, detail))
    context = {}
    if isinstance(error, QuotaExceededError):
        context = {"quota": error.quota, "value": error.value, "limit": error.limit}
    return problem_response(request, RefusalError(status, code, str(error), context=context))


def _refusal_of_http(request: Request, error: StarletteHTTPException) -> RefusalError:
    """Convert an error of Starlette's own: an unknown path, an unknown method, or a body that cannot be read."""
    status = error.status_code
    code = http.HTTPStatus(status).phrase.lower().replace(" ", "-").replace("'", "")
    detail = {
        404: f"there is no operation at {request.url.path}: /api/v1/openapi.json lists all operations",
        405: f"{request.url.path} does not support {request.method}: the header Allow lists the supported methods",
    }.get(status, str(error.detail))
    headers = dict(error.headers or {})
    if status == 405:
        headers["Allow"] = ", ".join(sorted({*headers.get("Allow", "").split(", "), *_methods(request)} - {""}))
    return RefusalError(status, code, detail, headers=headers)


def _methods(request: Request) -> set[str]:
    """Return the methods of a path over all of its routes: Starlette knows only the methods of one route."""
    app: FastAPI = request.app
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    for template, operations in app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), path):
            return {method.upper() for method in operations}
    return set()


def _refusal_of_validation(request: Request, error: RequestValidationError) -> RefusalError:
    mistakes: Sequence[Any] = error.errors()
    in_body = any(mistake["loc"][0] == "body" for mistake in mistakes)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if any(mistake["type"] == "json_invalid" for mistake in mistakes):
        return RefusalError(400, "malformed-json", f"the body is not JSON: {mistakes[0]['ctx']['error']}")
    if (
        in_body
        and media_type not in ("application/json", "multipart/form-data")
        and request.headers.get("content-length", "0") != "0"
    ):
        return RefusalError(
            415,
            "unsupported-media-type",
            f"the media type of the body must be application/json, got {media_type or 'none'!r}",
        )
    fields = tuple(
        ProblemField(pointer=_pointer(mistake["loc"]), message=mistake["msg"], code=mistake["type"])
        for mistake in mistakes
    )
    detail = "; ".join(f"{field.pointer}: {field.message}" for field in fields)
    return RefusalError(422, "invalid-request", detail, errors=fields)


def _pointer(location: Sequence[str | int]) -> str:
    where, *rest = location
    if where == "body":
        return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in rest)
    return "/".join(map(str, location))
