"""Login with a browser: plain HTML forms, which need no script.

A trusted proxy's user is logged in at once; a provider of identities is one link away; a token can be typed in.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Form, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from steptune.service.access.authentication import Access
from steptune.service.access.cookies import cookie_name, delete_cookie, session_cookie, set_cookie
from steptune.service.access.errors import AccessError, NotAuthenticatedError
from steptune.service.access.pending import PendingLogin
from steptune.service.access.principal import Method, Principal
from steptune.service.access.secrets import csrf_token_for
from steptune.service.access.sessions import Login
from steptune.service.api.problems import RefusalError
from steptune.service.api.security import RequestAccess, Requires, noted_refusals
from steptune.service.api.session import end_session, start_session

router = APIRouter(include_in_schema=False)
Anybody = Annotated[Principal, Requires()]
Next = Annotated[str, Query(alias="next", max_length=2000)]

OIDC_COOKIE = "steptune_oidc"
OIDC_SECONDS = 600
_LOCAL_PATH = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]*", re.ASCII)
_templates = Environment(loader=PackageLoader("steptune.service"), autoescape=True, undefined=StrictUndefined)


@router.get("/login")
def login_page(request: Request, access: RequestAccess, after: Next = "") -> Response:
    """Show the login form; users who are already logged in, here or at the proxy, are redirected."""
    name = access.proxies.user_name(request)
    principal = _known(request, access)
    if name is not None and (principal is None or principal.name != name):
        with noted_refusals(request):
            login = access.login_elsewhere(request, name)
        response = _go_on(request, after)
        start_session(request, response, access, login)
        return response
    if principal is not None and after:
        return _go_on(request, after)
    return _page(request, access, principal, after)


@router.post("/login")
def log_in(
    request: Request,
    access: RequestAccess,
    token: Annotated[str, Form(max_length=200)] = "",
    after: Annotated[str, Form(alias="next", max_length=2000)] = "",
) -> Response:
    """Open a session for a token that was typed in."""
    try:
        with noted_refusals(request):
            login = access.login_with_token(request, token.strip())
    except AccessError as error:
        return _page(request, access, None, after, error)
    response = _go_on(request, after)
    start_session(request, response, access, login)
    return response


@router.post("/logout")
def log_out(request: Request, access: RequestAccess, principal: Anybody) -> Response:
    """End the session."""
    response = RedirectResponse(_path(request, "/login"), 303)
    end_session(request, response, access)
    return response


@router.get("/login/oidc")
def begin_oidc(request: Request, access: RequestAccess, after: Next = "") -> Response:
    """Redirect the browser to the identity provider."""
    _check_oidc(access)
    url, pending = access.oidc.begin(_callback(access))
    kept = msgspec.json.encode([pending.state, pending.nonce, pending.verifier, after])
    response = RedirectResponse(url, 303, {"Cache-Control": "no-store"})
    text = base64.urlsafe_b64encode(kept).decode().rstrip("=")
    set_cookie(response, OIDC_COOKIE, text, max_age_s=OIDC_SECONDS, secure=access.proxies.is_secure(request))
    return response


@router.get("/login/oidc/callback")
def complete_oidc(request: Request, access: RequestAccess) -> Response:
    """Complete a login: the identity provider redirects the browser to this address (the OIDC redirect URI)."""
    _check_oidc(access)
    try:
        with noted_refusals(request):
            login, after = _oidc_login(request, access)
    except AccessError as error:
        return _page(request, access, None, "", error)
    response = _go_on(request, after)
    delete_cookie(response, OIDC_COOKIE, secure=access.proxies.is_secure(request))
    start_session(request, response, access, login)
    return response


def _oidc_login(request: Request, access: Access) -> tuple[Login, str]:
    pending, after = _pending(request, access)
    name = access.oidc.complete(dict(request.query_params), pending, _callback(access))
    return access.login_elsewhere(request, name), after


def _pending(request: Request, access: Access) -> tuple[PendingLogin, str]:
    """Return the state of the browser's login in progress from its cookie, and the address to open after the login."""
    kept = request.cookies.get(cookie_name(OIDC_COOKIE, access.proxies.is_secure(request)), "")
    try:
        text = base64.urlsafe_b64decode(kept + "=" * (-len(kept) % 4))
        state, nonce, verifier, after = msgspec.json.decode(text, type=tuple[str, str, str, str])
    except (binascii.Error, ValueError) as error:
        raise NotAuthenticatedError(
            "this browser has no login in progress, or the login has expired: begin again at /login", token_sent=True
        ) from error
    return PendingLogin(state=state, nonce=nonce, verifier=verifier), after


def _check_oidc(access: Access) -> None:
    if not access.settings.oidc_issuer:
        raise RefusalError(404, "not-found", "this service has no identity provider: log in with a token at /login")


def _callback(access: Access) -> str:
    return f"{access.settings.public_url.rstrip('/')}/login/oidc/callback"


def _known(request: Request, access: Access) -> Principal | None:
    """Return the user who is already logged in, if any."""
    cookie = session_cookie(request, access.proxies)
    if cookie is None and not access.settings.insecure_no_auth:
        return None
    try:
        return access.authenticate(request, None)
    except NotAuthenticatedError:
        return None


def _go_on(request: Request, after: str) -> Response:
    """Redirect to the page requested before the login if it belongs to this service, else to the list of studies."""
    target = after if _LOCAL_PATH.fullmatch(after) else _path(request, "/")
    return RedirectResponse(target, 303, {"Cache-Control": "no-store"})


def _page(
    request: Request, access: Access, principal: Principal | None, after: str, error: AccessError | None = None
) -> Response:
    cookie = session_cookie(request, access.proxies)
    has_session = principal is not None and principal.method is Method.SESSION and cookie is not None
    text = _templates.get_template("login.html").render(
        principal=principal,
        csrf_token=csrf_token_for(cookie) if has_session and cookie else "",
        after=after,
        error="" if error is None else str(error),
        login_url=_path(request, "/login"),
        logout_url=_path(request, "/logout"),
        oidc_url=_path(request, f"/login/oidc?{urlencode({'next': after})}") if access.settings.oidc_issuer else "",
    )
    headers = {"Cache-Control": "no-store", **(error.headers if error else {})}
    return HTMLResponse(text, 200 if error is None else error.status, headers)


def _path(request: Request, path: str) -> str:
    return f"{request.scope.get('root_path', '')}{path}"
