"""Browser sessions as a resource; the login pages are in `login.py`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import Field, SecretStr

from steptune.service.access.authentication import Access
from steptune.service.access.cookies import SESSION, delete_cookie, session_cookie, set_cookie
from steptune.service.access.principal import Method, Principal
from steptune.service.access.secrets import csrf_token_for
from steptune.service.access.sessions import Login
from steptune.service.alike import record_like
from steptune.service.api.known_parameters import check_query
from steptune.service.api.openapi import COMMON, refuses, returns
from steptune.service.api.problems import RefusalError
from steptune.service.api.requests import Body
from steptune.service.api.security import RequestAccess, Requires, noted_refusals
from steptune.tuner.records import Record

router = APIRouter(prefix="/session", tags=["session"], responses=COMMON)
Anybody = Annotated[Principal, Requires()]


class LoginRequest(Body):
    """A token to log in with."""

    token: SecretStr = Field(
        max_length=200,
        description="A token; the session has the token's scopes, and ends when the token does.",
        examples=["${STEPTUNE_TOKEN}"],
    )


class Me(Record):
    """Caller of the request.

    Attributes:
        user_id: The user.
        name: Name of the user.
        scopes: What this token or session may do.
        method: "token", "session", or "open" where nobody has to say who they are.
        token_id: The token that was sent, or with which the session was opened.
        expires_at: When the token or session ends at the latest; null for never.
        csrf_token: Value of the header `X-CSRF-Token` for requests with this session; null without a session.
    """

    user_id: str
    name: str
    scopes: list[str]
    method: Method
    token_id: str | None
    expires_at: datetime | None
    csrf_token: str | None


@router.post(
    "",
    status_code=201,
    summary="Log in",
    description="Opens a session for a browser: the answer sets its cookie, which scripts cannot read.",
    responses=returns(Me, "The user who has logged in.", status=201),
    dependencies=[Depends(check_query)],
)
def open_session(request: Request, access: RequestAccess, body: LoginRequest) -> Response:
    with noted_refusals(request):
        login = access.login_with_token(request, body.token.get_secret_value())
    response = _unkept(_me(login.principal, login.csrf_token), 201)
    start_session(request, response, access, login)
    return response


@router.get(
    "",
    summary="Who am I?",
    description="Returns the user and the permissions; for a session also the CSRF token that its requests must send.",
    responses=returns(Me, "Who is asking."),
)
def get_session(request: Request, access: RequestAccess, principal: Anybody) -> Response:
    cookie = session_cookie(request, access.proxies) if principal.method is Method.SESSION else None
    return _unkept(_me(principal, None if cookie is None else csrf_token_for(cookie)), 200)


@router.delete(
    "",
    status_code=204,
    summary="Log out",
    description="Ends the session whose cookie was sent.",
    responses={204: {"description": "The session is over."}, **refuses(409)},
)
def close_session(request: Request, access: RequestAccess, principal: Anybody) -> Response:
    if principal.method is not Method.SESSION:
        raise RefusalError(
            409, "no-session", "the request has no session to end: to end a token, send POST /tokens/{id}/revoke"
        )
    response = Response(status_code=204)
    end_session(request, response, access)
    return response


def start_session(request: Request, response: Response, access: Access, login: Login) -> None:
    """Set the cookie of a browser's new session, and end the browser's earlier session."""
    end_session(request, response, access)
    request.state.principal = login.principal
    request.state.is_change = True
    secure = access.proxies.is_secure(request)
    set_cookie(response, SESSION, login.cookie, max_age_s=login.max_age_s, secure=secure)


def end_session(request: Request, response: Response, access: Access) -> None:
    cookie = session_cookie(request, access.proxies)
    if cookie is not None:
        access.sessions.close(cookie)
        delete_cookie(response, SESSION, secure=access.proxies.is_secure(request))


def _me(principal: Principal, csrf_token: str | None) -> Me:
    return record_like(Me, principal, scopes=sorted(principal.scopes), csrf_token=csrf_token)


def _unkept(me: Me, status: int) -> Response:
    return Response(msgspec.json.encode(me), status, {"Cache-Control": "no-store"}, "application/json")
