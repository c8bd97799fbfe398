"""Refusals of the service as exceptions. Their texts are the service's own: what was violated, and the way out."""

from __future__ import annotations

from typing import Any

import msgspec

from steptune.tuner.errors import SteptuneError


class ProblemField(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a request."""

    pointer: str = ""
    message: str = ""
    code: str = ""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Problem details (RFC 9457), as far as they were sent: a proxy on the way may answer otherwise."""

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
        problem: What it said.
    """

    def __init__(self, problem: Problem) -> None:
        named = f" (request {problem.request_id})" if problem.request_id and problem.status >= 500 else ""
        super().__init__(f"{problem.detail or problem.title or f'the service answered {problem.status}'}{named}")
        self.problem = problem


class AccessRefusedError(ServiceError):
    """401 or 403: the token is missing, unknown, expired or revoked, or may not do this."""


class NotFoundError(ServiceError):
    """404: it is not there, or is not yours."""


class ConflictError(ServiceError):
    """409 or 412: its state does not allow it, or it was changed meanwhile."""


class InvalidRequestError(ServiceError):
    """400, 413, 415 or 422: what was sent is wrong; `problem.errors` names the fields."""


class TooManyRequestsError(ServiceError):
    """429: also after waiting."""


class ServiceUnreachableError(SteptuneError):
    """The service could not be reached, or its answer broke off, also after trying again."""


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
    """The exception of an answer that is no success."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except msgspec.MsgspecError:
        problem = Problem(status=status, request_id=request_id)
    return KINDS.get(status, ServiceError)(problem)
