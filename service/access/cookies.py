"""Names and attributes of the cookies. The attributes prevent other sites and hosts from using them."""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.responses import Response

from steptune.service.access.proxies import Proxies

SESSION = "steptune_session"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def cookie_name(name: str, secure: bool) -> str:
    """Return a cookie's name. With https it gets the prefix `__Host-`: browsers accept such a cookie only from this
    very host and over https.
    """
    return f"__Host-{name}" if secure else name


def session_cookie(request: HTTPConnection, proxies: Proxies) -> str | None:
    return request.cookies.get(cookie_name(SESSION, proxies.is_secure(request)))


def set_cookie(response: Response, name: str, value: str, *, max_age_s: int, secure: bool) -> None:
    response.set_cookie(
        cookie_name(name, secure), value, max_age=max_age_s, path="/", secure=secure, httponly=True, samesite="lax"
    )


def delete_cookie(response: Response, name: str, *, secure: bool) -> None:
    response.delete_cookie(cookie_name(name, secure), path="/", secure=secure, httponly=True, samesite="lax")
