"""Browser sessions: only the hash of a session's cookie is stored. A session ends by idleness, age or logout, or with
its token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, Row, bindparam, delete, select, update

from steptune.service.access.errors import NotAuthenticatedError
from steptune.service.access.principal import Method, Principal
from steptune.service.access.secrets import csrf_token_for, new_cookie, sha256
from steptune.service.access.tokens import check_alive, effective_scopes, utc_now
from steptune.service.connections import reading, writing
from steptune.service.models import ApiTokenRow, BrowserSessionRow, UserRow
from steptune.service.settings.access import AccessSettings
from steptune.service.settings.scopes import scopes_text
from steptune.tuner.errors import StoreError

EXTENDED_EVERY_S = 60.0
"""Minimum seconds between two extensions of a session, which is also the precision of its idle time."""

log = logging.getLogger("steptune.access")


@dataclass(frozen=True, kw_only=True)
class Login:
    """A session that was just opened, with the only copy of its cookie and the CSRF token for its requests."""

    cookie: str = field(repr=False)
    principal: Principal
    max_age_s: int

    @property
    def csrf_token(self) -> str:
        return csrf_token_for(self.cookie)


class SessionStore:
    """Sessions of browsers in the database. All queries of the table are here.

    Args:
        engine: Engine of a database whose schema has been checked.
        settings: Settings with the lifetimes of sessions.
        clock: Returns the current time.
    """

    def __init__(self, engine: Engine, settings: AccessSettings, clock: Callable[[], datetime] = utc_now) -> None:
        self._engine = engine
        self._idle = timedelta(minutes=settings.session_idle_minutes)
        self._longest = timedelta(hours=settings.session_max_hours)
        self._clock = clock

    def open(self, principal: Principal) -> Login:
        """Open a session with the scopes of `principal`; it never outlasts the token that opened it."""
        now = self._clock()
        cookie = new_cookie()
        row = BrowserSessionRow(
            session_sha256=sha256(cookie),
            user_id=principal.user_id,
            token_id=principal.token_id,
            scopes=scopes_text(principal.scopes),
            created_at=now,
            expires_at=min(now + self._idle, now + self._longest),
        )
        with writing(self._engine) as session:
            session.add(row)
        return Login(
            cookie=cookie,
            principal=Principal(
                user_id=principal.user_id,
                name=principal.name,
                scopes=principal.scopes,
                method=Method.SESSION,
                token_id=principal.token_id,
                expires_at=now + self._longest,
            ),
            max_age_s=int(self._longest.total_seconds()),
        )

    def authenticate(self, cookie: str) -> Principal:
        """Return the user of a session's cookie, and extend the session.

        Raises:
            NotAuthenticatedError: The session is unknown or over, its token has ended, or its user is disabled.
        """
        now = self._clock()
        with reading(self._engine) as session:
            found = session.execute(_SESSION_WITH_USER, {"wanted": sha256(cookie)}).first()
        if found is None or min(found.session_ends_at, found.created_at + self._longest) <= now:
            raise NotAuthenticatedError("the session is over: log in again")
        check_alive(found, now)
        self._extend(sha256(cookie), found, now)
        return Principal(
            user_id=found.user_id,
            name=found.user_name,
            scopes=effective_scopes(found.scopes, found.user_scopes),
            method=Method.SESSION,
            token_id=found.token_id,
            expires_at=found.created_at + self._longest,
        )

    def close(self, cookie: str) -> None:
        """End a session; ending it twice changes nothing."""
        with writing(self._engine) as session:
            session.execute(delete(BrowserSessionRow).where(BrowserSessionRow.session_sha256 == sha256(cookie)))

    def _extend(self, session_sha256: str, found: Row[*tuple[Any, ...]], now: datetime) -> None:
        ends_at = min(now + self._idle, found.created_at + self._longest)
        if ends_at - found.session_ends_at < timedelta(seconds=EXTENDED_EVERY_S):
            return
        query = update(BrowserSessionRow).where(BrowserSessionRow.session_sha256 == session_sha256)
        try:
            with writing(self._engine) as session:
                session.execute(query.values(expires_at=ends_at))
        except StoreError as error:  # a full disk must not keep anybody from reading
            log.warning("failed to extend a session: %s", error)


_SESSION_WITH_USER = (
    select(
        BrowserSessionRow.user_id,
        BrowserSessionRow.token_id,
        BrowserSessionRow.scopes,
        BrowserSessionRow.created_at,
        BrowserSessionRow.expires_at.label("session_ends_at"),
        ApiTokenRow.expires_at,
        ApiTokenRow.revoked_at,
        UserRow.name.label("user_name"),
        UserRow.scopes.label("user_scopes"),
        UserRow.disabled_at,
    )
    .join(UserRow, UserRow.user_id == BrowserSessionRow.user_id)
    .outerjoin(ApiTokenRow, ApiTokenRow.token_id == BrowserSessionRow.token_id)
    .where(BrowserSessionRow.session_sha256 == bindparam("wanted"))
)
