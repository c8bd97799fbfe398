"""Errors of access control: each defines the status, code and title of the problem details that answer a refused
request.

AccessError(SteptuneError)
 ├─ NotAuthenticatedError401 nobody is known: no token or session, or one that is not valid (any more)
 ├─ MissingScopeError    403 the token or session lacks a scope
 ├─ CrossSiteRequestError403 a browser's request that does not prove to come from our own pages
 ├─ HostRefusedError     403 a host name that is not loopback, where everybody on loopback may do everything
 ├─ TooManyRequestsError 429 more than the rate limit
 ├─ NotFoundError        404 no token or user has this id
 ├─ NameTakenError       409 another user has this name
 └─ LoginError           502 the provider of identities did not answer as it must
"""

from __future__ import annotations

from typing import Any

from steptune.service.settings.scopes import Scope
from steptune.tuner.errors import SteptuneError

REALM = 'Bearer realm="steptune"'


class AccessError(SteptuneError):
    """Base class of refusals of access.

    Attributes:
        status: HTTP status of the answer.
        code: Code for programs; it never changes.
        title: Title, the same for every answer with this code.
        headers: Headers of the answer.
        members: Further members of the problem details, for programs.
    """

    status = 403
    code = "forbidden"
    title = "The request is not allowed"

    def __init__(
        self, detail: str, *, headers: dict[str, str] | None = None, members: dict[str, Any] | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.headers = headers or {}
        self.members = members or {}


class NotAuthenticatedError(AccessError):
    """The request has no valid credentials."""

    status = 401
    code = "not-authenticated"
    title = "A valid token or session is needed"

    def __init__(self, detail: str, *, token_sent: bool = False) -> None:
        challenge = f'{REALM}, error="invalid_token"' if token_sent else REALM
        super().__init__(detail, headers={"WWW-Authenticate": challenge})
        self.token_sent = token_sent


class MissingScopeError(AccessError):
    """The token or session lacks a scope."""

    code = "missing-scope"
    title = "The token or session lacks a scope"

    def __init__(self, scope: Scope, held: str) -> None:
        super().__init__(
            f"this operation needs the scope `{scope}`, but the token or session has `{held or 'none'}`: use a "
            "token with that scope, or ask an administrator for one",
            headers={"WWW-Authenticate": f'{REALM}, error="insufficient_scope", scope="{scope}"'},
            members={"required_scope": scope.value},
        )


class CrossSiteRequestError(AccessError):
    """A browser's request may come from a page of another site: its origin differs, or its CSRF token is missing or
    wrong.
    """

    code = "cross-site-request"
    title = "The request was not verified as coming from this service's own pages"


class HostRefusedError(AccessError):
    """The request is for a host name that is not loopback."""

    code = "host-refused"
    title = "Without authentication, only loopback names are served"


class TooManyRequestsError(AccessError):
    """The client sent more requests than the rate limit allows."""

    status = 429
    code = "too-many-requests"
    title = "Too many requests"


class NotFoundError(AccessError):
    """No token or user has this id."""

    status = 404
    code = "not-found"
    title = "Not found"


class NameTakenError(AccessError):
    """Another user has this name."""

    status = 409
    code = "name-taken"
    title = "Another user has this name"


class LoginError(AccessError):
    """The identity provider did not answer as required."""

    status = 502
    code = "login-failed"
    title = "The login could not be completed"
