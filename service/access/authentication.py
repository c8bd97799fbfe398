"""Authentication of a request: a token, a browser's session, or the local user where no login is required."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import Engine
from starlette.requests import HTTPConnection

from steptune.service.access.audit import AuditLog
from steptune.service.access.concurrency import Concurrency
from steptune.service.access.cookies import SAFE_METHODS, session_cookie
from steptune.service.access.errors import AccessError, CrossSiteRequestError, MissingScopeError, NotAuthenticatedError
from steptune.service.access.known import KnownTokens
from steptune.service.access.login_codes import LoginCodes, is_login_code
from steptune.service.access.logins import principal_named, principal_of
from steptune.service.access.open_access import LOCAL_USER, check_host_header, local_principal
from steptune.service.access.principal import Principal
from steptune.service.access.proxies import Proxies
from steptune.service.access.rate_limits import RateLimit, client_of
from steptune.service.access.secrets import csrf_token_for, equal, parse_token
from steptune.service.access.sessions import Login, SessionStore
from steptune.service.access.tokens import TokenStore, utc_now
from steptune.service.access.users import UserStore
from steptune.service.settings.access import AccessSettings
from steptune.service.settings.scopes import Scope, scopes_text

if TYPE_CHECKING:
    from steptune.service.access.oidc import OidcProvider

NO_CREDENTIALS = "send a token as `Authorization: Bearer stp_…`, or log in at /login with a browser"


class Access:
    """Access control of one API process; `steptune.service.app` keeps it in `app.state.access`.

    Args:
        engine: Engine of a database whose schema has been checked.
        settings: Settings of access control.
        clock: Returns the current time.
    """

    def __init__(self, engine: Engine, settings: AccessSettings, clock: Callable[[], datetime] = utc_now) -> None:
        self.settings = settings
        self.clock = clock
        known = KnownTokens(settings.token_recheck_s)
        self.tokens = TokenStore(engine, clock, known)
        self.sessions = SessionStore(engine, settings, clock)
        self.users = UserStore(engine, known)
        self.audit = AuditLog(engine, clock)
        self.proxies = Proxies(settings)
        self._codes = LoginCodes()
        self._engine = engine
        self._requests = RateLimit("requests", settings.requests_per_minute)
        self.open_of_user = Concurrency(
            "requests of one user", settings.max_user_requests, "STEPTUNE_MAX_USER_REQUESTS"
        )
        self.open_of_client = Concurrency(
            "requests from one address", settings.max_client_requests, "STEPTUNE_MAX_CLIENT_REQUESTS"
        )
        self._failures = RateLimit("failed-logins", settings.failed_logins_per_minute)

    def authenticate(self, request: HTTPConnection, csrf_token: str | None) -> Principal:
        """Return the sender of a request.

        Args:
            request: Request, whose headers and cookies are read.
            csrf_token: CSRF token from the header or the form; required for unsafe requests with a session.

        Raises:
            NotAuthenticatedError: No user is known for the request.
            TooManyRequestsError: Too many refused logins from this address.
            CrossSiteRequestError: A page of another site made a browser send it.
            HostRefusedError: No login is required, and the request's host name is not loopback.
        """
        try:
            if self.settings.insecure_no_auth:
                check_host_header(request)
                self.check_same_origin(request)
                return self._local
            return self._authenticate(request, csrf_token)
        except AccessError as error:
            self.count_refusal(request, error)
            raise

    def recall(self, request: HTTPConnection) -> Principal | None:
        """Return the sender of a request from the cache of recently valid tokens, without a query; None if its token is
        not cached.
        """
        text = None if self.settings.insecure_no_auth else _bearer_text(request)
        bearer = None if text is None else parse_token(text)
        return None if bearer is None else self.tokens.recall(bearer)

    def authenticate_token(self, text: str) -> Principal:
        """Return the owner of a token.

        Raises:
            NotAuthenticatedError: The token is not valid.
        """
        bearer = parse_token(text)
        if bearer is None:
            raise NotAuthenticatedError("invalid token: tokens look like stp_<id>_<secret>", token_sent=True)
        return self.tokens.authenticate(bearer)

    def limit(self, principal: Principal) -> dict[str, str]:
        """Count a request, and return the headers that state how many requests remain.

        All tokens and sessions of a user count together: any user may make more of them.

        Raises:
            TooManyRequestsError: Nothing was left.
        """
        return self._requests.spend(principal.user_id)

    def count_refusal(self, request: HTTPConnection, refusal: AccessError) -> None:
        """Count a refused login against the client's address. Requests without any credentials are not counted.

        Raises:
            TooManyRequestsError: There were too many; these are not logged.
        """
        if not isinstance(refusal, NotAuthenticatedError) or refusal.token_sent:
            self._failures.spend(client_of(self.proxies.client_address(request)))

    def check_same_origin(self, request: HTTPConnection) -> None:
        """Refuse an unsafe request that a browser sends from a page of another site.

        Raises:
            CrossSiteRequestError: The browser states that it does.
        """
        if _method(request) not in SAFE_METHODS and not self.proxies.is_same_origin(request):
            raise CrossSiteRequestError(
                "the browser reports that this request comes from another site: send it from this "
                "service's own pages (behind a proxy, set public_url to the address that browsers use)"
            )

    def login_with_token(self, request: HTTPConnection, text: str) -> Login:
        """Open a browser session for a token, or for the one-time code that `serve` has shown.

        Raises:
            NotAuthenticatedError: The token or code is not valid.
            TooManyRequestsError: Too many refused logins from this address, or requests of this user.
            CrossSiteRequestError: As `authenticate`.
        """
        try:
            self.check_same_origin(request)
            principal = self._redeem(text) if is_login_code(text) else self.authenticate_token(text)
        except AccessError as error:
            self.count_refusal(request, error)
            raise
        self.limit(principal)
        return self.sessions.open(principal)

    def new_login_code(self) -> str | None:
        """Return a code with which the first administrator can log in once, within ten minutes; None if there is no
        administrator.
        """
        administrator = self.users.first_administrator(but=LOCAL_USER)
        return None if administrator is None else self._codes.issue(administrator.user_id)

    def login_elsewhere(self, request: HTTPConnection, name: str) -> Login:
        """Open a browser session for a user whom a proxy or identity provider has authenticated.

        Raises:
            NotAuthenticatedError: The user is not known here.
            TooManyRequestsError: As `login_with_token`.
        """
        try:
            principal = principal_named(self.users, self.settings, name)
        except AccessError as error:
            self.count_refusal(request, error)
            raise
        if principal.is_new:
            self._record_new_user(request, principal)
        self.limit(principal)
        return self.sessions.open(principal)

    @functools.cached_property
    def oidc(self) -> OidcProvider:
        """Return the identity provider that the settings name; call this only where they name one.

        Raises:
            MissingDependencyError: The extra `oidc` is not installed.
        """
        from steptune.service.access.oidc import OidcProvider  # an extra: most services do without

        assert self.settings.oidc_issuer
        return OidcProvider(self.settings)

    def _redeem(self, code: str) -> Principal:
        return principal_of(self.users.get(self._codes.redeem(code)))

    def _authenticate(self, request: HTTPConnection, csrf_token: str | None) -> Principal:
        text = _bearer_text(request)
        if text is not None:
            return self.authenticate_token(text)
        cookie = session_cookie(request, self.proxies)
        if cookie is None:
            raise NotAuthenticatedError(NO_CREDENTIALS)
        principal = self.sessions.authenticate(cookie)
        self._check_proxy_agrees(request, principal)
        if _method(request) not in SAFE_METHODS:
            self.check_same_origin(request)
            check_csrf(cookie, csrf_token)
        return principal

    def _record_new_user(self, request: HTTPConnection, principal: Principal) -> None:
        """Record in the audit log that a login created a user, as for a user whom an administrator creates. The login
        itself has a separate entry.
        """
        self.audit.record(
            principal,
            action="create_user",
            target=principal.user_id,
            outcome="done",
            request_id=request.scope.get("steptune.request_id", ""),
            detail={
                "name": principal.name,
                "scopes": scopes_text(principal.scopes),
                "address": self.proxies.client_address(request),
            },
        )

    def _check_proxy_agrees(self, request: HTTPConnection, principal: Principal) -> None:
        name = self.proxies.user_name(request)
        if name is not None and principal.token_id is None and name != principal.name:
            raise NotAuthenticatedError("the proxy now reports another user than this session: log in again")

    @functools.cached_property
    def _local(self) -> Principal:
        return local_principal(self._engine)


def check_scope(principal: Principal, scope: Scope) -> None:
    """Refuse a user or token without `scope`.

    Raises:
        MissingScopeError: The scope is missing.
    """
    if scope not in principal.scopes:
        raise MissingScopeError(scope, scopes_text(principal.scopes))


def check_csrf(cookie: str, csrf_token: str | None) -> None:
    """Refuse a request without the CSRF token of its session.

    Raises:
        CrossSiteRequestError: The CSRF token is missing, or belongs to another session.
    """
    if csrf_token is None or not equal(csrf_token_for(cookie), csrf_token):
        found = "no" if csrf_token is None else "a wrong"
        raise CrossSiteRequestError(
            f"the request has {found} CSRF token: send the `csrf_token` from GET /api/v1/session in the header "
            "X-CSRF-Token, or in the form field csrf_token"
        )


def _bearer_text(request: HTTPConnection) -> str | None:
    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else None


def _method(request: HTTPConnection) -> str:
    return str(request.scope.get("method", "GET"))
