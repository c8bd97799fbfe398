"""Permission to call an endpoint: `principal: Annotated[Principal, Requires(Scope.READ)]`.

The dependency authenticates, limits the rate, checks the scope, and refuses query parameters that the operation does
not have. Refusals of access are `AccessError`s, which the handler of errors turns into problem details. It also puts
the security schemes into the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from steptune.service.access.authentication import Access, check_scope
from steptune.service.access.cookies import SESSION
from steptune.service.access.errors import AccessError
from steptune.service.access.principal import Principal
from steptune.service.api.known_parameters import check_query
from steptune.service.settings.scopes import Scope

CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf_token"

_TOKEN = HTTPBearer(
    bearerFormat="stp_<token id>_<secret>",
    description="A token made by `steptune token create` or `POST /api/v1/tokens`. The scopes are `read`, `submit`, "
    "`worker` and `admin`; `admin` includes the other three.",
)
SESSION_SCHEME = {
    "type": "apiKey",
    "in": "cookie",
    "name": SESSION,
    "description": f"Set by `POST /api/v1/session`; its name is `__Host-{SESSION}` over https. Requests that change "
    f"something must also send the header `{CSRF_HEADER}` with the `csrf_token` from `GET /api/v1/session`.",
}
"""Security scheme of sessions. The OpenAPI document adds it as the alternative wherever a token is accepted."""


async def access_of(request: Request) -> Access:
    """Return the access control that `create_app` stored."""
    access: Access = request.app.state.access
    return access


async def csrf_token_of(request: Request) -> str | None:
    """Return the CSRF token of a request: from a header, or from a field of a plain form."""
    header = request.headers.get(CSRF_HEADER)
    if header is not None:
        return header
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type == "application/x-www-form-urlencoded":
        await request.body()  # kept, for others to read it too
        field = (await request.form()).get(CSRF_FIELD)
        return field if isinstance(field, str) else None
    return None


class _Authorised(SecurityBase):
    """Single dependency for all access control, because FastAPI takes longer to resolve a dependency than to run it."""

    model = _TOKEN
    scheme_name = "token"

    def __init__(self, scopes: Sequence[Scope]) -> None:
        self._scopes = scopes

    async def __call__(self, request: Request) -> Principal:
        access = await access_of(request)
        with noted_refusals(request):
            principal = access.recall(request)
            if principal is None:
                csrf_token = await csrf_token_of(request)
                principal = await run_in_threadpool(access.authenticate, request, csrf_token)
            request.state.principal = principal
            if not hasattr(request.state, "open_of_user"):
                access.open_of_user.enter(principal.user_id)
                request.state.open_of_user = principal.user_id  # until the answer is sent: AccessMiddleware
            request.state.rate_limit = access.limit(principal)
            for scope in self._scopes:
                check_scope(principal, scope)
        await check_query(request)
        return principal


@contextmanager
def noted_refusals(request: Request) -> Iterator[None]:
    """Mark the request if the code in this context refuses it, so that the audit log records the refusal."""
    try:
        yield
    except AccessError as error:
        request.state.refusal = error
        raise


def note(request: Request, **detail: object) -> None:
    """Add details to the audit log's entry about this request; never a secret."""
    request.state.audit = {**getattr(request.state, "audit", {}), **detail}


def Requires(*scopes: Scope) -> Any:
    """Return a dependency on the caller, who must have all of `scopes`. Without scopes, every authenticated caller is
    allowed.
    """
    return Security(_Authorised(scopes), scopes=[scope.value for scope in scopes])


RequestAccess = Annotated[Access, Depends(access_of)]
"""Access control of a request, for the endpoints that manage access."""
