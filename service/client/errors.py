"""Refusals by the service, as exceptions. Their texts are the service's own: the violated requirement, and the way
out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from steptune.tuner.errors import SteptuneError


class ProblemField(msgspec.Struct, frozen=True, kw_only=True):
    """A single mistake in a request."""

    pointer: str = ""
    message: str = ""
    code: str = ""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Problem details (RFC 9457), as far as they were received: a proxy in between may answer in another form."""

    status: int
    code: str = ""
    title: str = ""
    detail: str = ""
    instance: str = ""
    request_id: str = ""
    errors: tuple[ProblemField, ...] = ()
    context: dict[str, Any] = {}


class ServiceError(SteptuneError):
    """The service refused a request, or failed.

    Attributes:
        problem: Problem details of the answer.
    """

    def __init__(self, problem: Problem) -> None:
        named = f" (request {problem.request_id})" if problem.request_id and problem.status >= 500 else ""
        super().__init__(f"{problem.detail or problem.title or f'the service answered {problem.status}'}{named}")
        self.problem = problem


class AccessRefusedError(ServiceError):
    """401 or 403: the token is missing, unknown, expired or revoked, or may not do this."""


class NotFoundError(ServiceError):
    """404: the resource does not exist, or belongs to another user."""


class ConflictError(ServiceError):
    """409 or 412: the state of the resource does not allow the request, or it was changed meanwhile."""


class InvalidRequestError(ServiceError):
    """400, 413, 415 or 422: the request is invalid; `problem.errors` names the fields."""


class TooManyRequestsError(ServiceError):
    """429: too many requests, even after waiting."""


class ServiceUnreachableError(SteptuneError):
    """The service could not be reached, or its answer broke off, even after retries."""


KINDS: dict[int, type[ServiceError]] = {
    400: InvalidRequestError,
    401: AccessRefusedError,
    403: AccessRefusedError,
    404: NotFoundError,
    409: ConflictError,
    412: ConflictError,
    413: InvalidRequestError,
    415: InvalidRequestError,
    422: InvalidRequestError,
    429: TooManyRequestsError,
}


def error_of(status: int, body: bytes, request_id: str) -> ServiceError:
    """Return the exception for an unsuccessful answer."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except msgspec.MsgspecError:
        problem = Problem(status=status, request_id=request_id)
    return KINDS.get(status, ServiceError)(problem)
