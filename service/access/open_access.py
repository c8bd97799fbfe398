"""`--insecure-no-auth`: everybody on this machine may do everything.

Two checks keep "this machine" true: the service listens on loopback only, and answers only to loopback names, since
a page of any web site may point a name of its own at 127.0.0.1 and have the browser ask there (DNS rebinding).
"""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import Engine
from starlette.requests import HTTPConnection

from steptune.service.access.errors import HostRefusedError, NameTakenError
from steptune.service.access.principal import Method, Principal
from steptune.service.access.users import UserStore
from steptune.service.settings.addresses import is_loopback
from steptune.service.settings.scopes import ALL_SCOPES, Scope
from steptune.tuner.errors import ChoiceError

LOCAL_USER = "local"
"""Name of the user at the machine; no login by proxy or OpenID Connect can have it."""


def check_loopback_only(host: str) -> None:
    """Refuse to listen on an address that other machines can reach.

    Raises:
        ChoiceError: Other machines may reach it.
    """
    if not is_loopback(host):
        raise ChoiceError(
            f"--insecure-no-auth needs a loopback address, got --host {host}: anyone who can reach that address "
            "could do everything. Use --host 127.0.0.1, or leave out --insecure-no-auth and create tokens"
        )


def check_host_header(request: HTTPConnection) -> None:
    """Refuse a request whose host name is not loopback.

    Raises:
        HostRefusedError: The request names another host.
    """
    host = request.headers.get("Host", "")
    if not is_loopback(_without_port(host)):
        raise HostRefusedError(
            f"the request names the host {host[:200]!r}: without authentication, only localhost, 127.0.0.1 and "
            "[::1] are served"
        )


def local_principal(engine: Engine) -> Principal:
    """Return the single user that exists without authentication; the user is created on first use."""
    users = UserStore(engine)
    with suppress(NameTakenError):  # it was made before, or by another process at this moment
        users.create(LOCAL_USER, {Scope.ADMIN})
    user = users.named(LOCAL_USER)
    return Principal(user_id=user.user_id, name=user.name, scopes=ALL_SCOPES, method=Method.OPEN)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
