"""Bearer tokens: issued once and stored as hashes. They end by expiry, by revocation, or with the token that created
them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, Row, Select, bindparam, or_, select, update
from sqlalchemy.orm import Session

from steptune.service.access.errors import MissingScopeError, NotAuthenticatedError, NotFoundError
from steptune.service.access.known import KnownTokens
from steptune.service.access.principal import Method, Principal
from steptune.service.access.secrets import NO_HASH, BearerToken, equal, new_token, sha256
from steptune.service.access.users import MAX_NAME, unknown_user
from steptune.service.alike import record_like
from steptune.service.connections import querying, reading, writing
from steptune.service.models import ApiTokenRow, UserRow
from steptune.service.settings.scopes import Scope, implied, parse_scopes, scopes_text
from steptune.tuner.errors import ChoiceError, StoreError
from steptune.tuner.records import Record

LAST_USE_S = 60.0
"""Minimum seconds between two updates of a token's last use, so that most read requests write nothing."""
_MAX_DAYS = 36_500
_REFUSED = "the token is not valid: check it for missing characters, or ask for a new one"

log = logging.getLogger("steptune.access")


class Token(Record):
    """Properties of a token, without its secret.

    Attributes:
        token_id: Sortable by time; the part of the token that is no secret.
        user_id: The user to whom it belongs.
        parent_id: The token with which it was made; it is revoked with it.
        name: Purpose of the token.
        scopes: Scopes of the token that its user still has.
        created_at: When it was made.
        expires_at: When it expires; null for never.
        revoked_at: When it was revoked; null if it was not.
        last_used_at: Time of the last use, to the minute; null if never used.
    """

    token_id: str
    user_id: str
    parent_id: str | None
    name: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


def utc_now() -> datetime:
    return datetime.now(UTC)


class TokenStore:
    """Tokens in the database. All queries of the table are here.

    Args:
        engine: Engine of a database whose schema has been checked.
        clock: Returns the current time.
        known: Cache of recently valid tokens, which are not looked up again.
    """

    def __init__(
        self, engine: Engine, clock: Callable[[], datetime] = utc_now, known: KnownTokens | None = None
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._known = known or KnownTokens(0)

    def recall(self, bearer: BearerToken) -> Principal | None:
        """Return the sender of a token from the cache of recently valid tokens, without a query; None if the token is
        not cached.
        """
        return self._known.recall(bearer, self._clock())

    def issue(
        self,
        user_id: str,
        *,
        name: str,
        scopes: Iterable[Scope],
        days: float | None,
        by: Principal | None = None,
    ) -> tuple[Token, BearerToken]:
        """Issue a token; the result has the only copy of its secret.

        Args:
            user_id: Owner of the token.
            name: Purpose of the token, to distinguish it from others.
            scopes: Scopes of the token, at most the user's.
            days: Lifetime in days; None for unlimited.
            by: Caller who makes it through the service: it gets no more scopes than the caller has. A token made for
                oneself ends no later than the token that made it, directly or through a session.

        Raises:
            NotFoundError: No user has this id.
            ChoiceError: More scopes than allowed, the user is disabled, or the lifetime is out of range.
            NotAuthenticatedError: The token or session of `by` was revoked or expired a moment ago.
        """
        with writing(self._engine) as session:
            return issue_in(session, user_id, name=name, scopes=scopes, days=days, now=self._clock(), by=by)

    def authenticate(self, bearer: BearerToken) -> Principal:
        """Return the sender of a token.

        Raises:
            NotAuthenticatedError: It is unknown or wrong, has expired, was revoked, or its user is disabled.
        """
        now = self._clock()
        generation = self._known.generation
        with querying(self._engine) as connection:
            found = connection.execute(_TOKEN_WITH_USER, {"wanted": bearer.token_id}).first()
        right = equal(sha256(bearer.secret), found.secret_sha256 if found else NO_HASH)
        if found is None or not right:
            raise NotAuthenticatedError(_REFUSED, token_sent=True)
        check_alive(found, now)
        self._note_use(bearer.token_id, found.last_used_at, now)
        principal = Principal(
            user_id=found.user_id,
            name=found.user_name,
            scopes=effective_scopes(found.scopes, found.user_scopes),
            method=Method.TOKEN,
            token_id=bearer.token_id,
            expires_at=found.expires_at,
        )
        self._known.remember(bearer, principal, generation)
        return principal

    def revoke(self, token_id: str, *, owner_id: str | None = None, by: Principal | None = None) -> Token:
        """Revoke a token and all tokens that were made with it; a second call changes nothing.

        Args:
            token_id: Id of the token.
            owner_id: Required owner; None for any.
            by: Caller who asks for it through the service: a token may revoke itself and tokens made with it, and
                others only if it has all of their scopes.

        Raises:
            NotFoundError: There is no such token.
            MissingScopeError: The token has scopes that `by` lacks.
        """
        with writing(self._engine) as session:
            row = session.get(ApiTokenRow, token_id, with_for_update=True)
            if row is None or owner_id not in (None, row.user_id):
                raise _unknown_token(token_id)
            if by is not None:
                _check_revoke(session, row, by)
            session.execute(
                update(ApiTokenRow)
                .where(ApiTokenRow.token_id.in_(_family(token_id)), ApiTokenRow.revoked_at.is_(None))
                .values(revoked_at=self._clock()),
                execution_options={"synchronize_session": False},
            )
            session.refresh(row)
            revoked = token_of(row)
        self._known.forget()
        return revoked

    def get(self, token_id: str, *, owner_id: str | None = None) -> Token:
        """Return a token.

        Raises:
            NotFoundError: There is no such token of `owner_id` (of anybody if None).
        """
        with reading(self._engine) as session:
            row = session.get(ApiTokenRow, token_id)
            if row is None or owner_id not in (None, row.user_id):
                raise _unknown_token(token_id)
            return token_of(row)

    def page(self, *, limit: int, owner_id: str | None = None, before: str | None = None) -> list[Token]:
        """Return tokens made before the token `before`, of one user or of all, the newest first."""
        query = select(ApiTokenRow).order_by(ApiTokenRow.token_id.desc()).limit(limit)
        if owner_id is not None:
            query = query.where(ApiTokenRow.user_id == owner_id)
        if before is not None:
            query = query.where(ApiTokenRow.token_id < before)
        with reading(self._engine) as session:
            return [token_of(row) for row in session.scalars(query)]

    def _note_use(self, token_id: str, last_used_at: datetime | None, now: datetime) -> None:
        recent = now - timedelta(seconds=LAST_USE_S)
        if last_used_at is not None and last_used_at > recent:
            return
        # Of several requests at once, the first one writes.
        unwritten = or_(ApiTokenRow.last_used_at.is_(None), ApiTokenRow.last_used_at <= recent)
        try:
            with writing(self._engine) as session:
                session.execute(
                    update(ApiTokenRow).where(ApiTokenRow.token_id == token_id, unwritten).values(last_used_at=now)
                )
        except StoreError as error:  # a full disk must not keep anybody from reading
            log.warning("failed to record the last use of token %s: %s", token_id, error)


def issue_in(
    session: Session,
    user_id: str,
    *,
    name: str,
    scopes: Iterable[Scope],
    days: float | None,
    now: datetime,
    by: Principal | None = None,
) -> tuple[Token, BearerToken]:
    """Issue a token as `TokenStore.issue` does, within a transaction."""
    user = session.get(UserRow, user_id, with_for_update=True)
    if user is None:
        raise unknown_user(user_id)
    asked = frozenset(scopes)
    _check_issue(user, name, asked, days, by)
    expires_at = None if days is None else now + timedelta(days=days)
    parent = None
    if by is not None and by.user_id == user_id:  # what an administrator makes for others outlives the maker's token
        parent = _living_parent(session, by, now)
    if parent is not None and parent.expires_at is not None:
        expires_at = min(expires_at or parent.expires_at, parent.expires_at)
    bearer = new_token()
    row = ApiTokenRow(
        token_id=bearer.token_id,
        user_id=user_id,
        parent_id=None if parent is None else parent.token_id,
        name=name,
        secret_sha256=sha256(bearer.secret),
        scopes=scopes_text(asked),
        created_at=now,
        expires_at=expires_at,
    )
    session.add(row)
    session.flush()
    return token_of(row), bearer


def effective_scopes(token_scopes: str, user_scopes: str) -> frozenset[Scope]:
    """Return the scopes that a token has now: its user may have lost some since it was made."""
    return implied(parse_scopes(token_scopes)) & implied(parse_scopes(user_scopes))


def check_alive(found: Row[*tuple[Any, ...]], now: datetime) -> None:
    """Refuse a token that has expired, was revoked or belongs to a disabled user. Its secret must have been checked
    already.

    Raises:
        NotAuthenticatedError: One of these is the case; the message says which, as whoever holds the secret may know
            it.
    """
    if found.revoked_at is not None:
        raise NotAuthenticatedError(
            f"the token was revoked at {found.revoked_at:%Y-%m-%d %H:%M} UTC: ask for a new one", token_sent=True
        )
    if found.expires_at is not None and found.expires_at <= now:
        raise _expired(found.expires_at)
    if found.disabled_at is not None:
        raise NotAuthenticatedError("the user is disabled: ask an administrator", token_sent=True)


def token_of(row: ApiTokenRow) -> Token:
    return record_like(Token, row, scopes=row.scopes.split())


_TOKEN_WITH_USER = (
    select(
        ApiTokenRow.secret_sha256,
        ApiTokenRow.scopes,
        ApiTokenRow.expires_at,
        ApiTokenRow.revoked_at,
        ApiTokenRow.last_used_at,
        ApiTokenRow.user_id,
        UserRow.name.label("user_name"),
        UserRow.scopes.label("user_scopes"),
        UserRow.disabled_at,
    )
    .join(UserRow, UserRow.user_id == ApiTokenRow.user_id)
    .where(ApiTokenRow.token_id == bindparam("wanted"))
)
"""Statement that finds a token with its user; built once, because every request runs it."""


def _check_issue(user: UserRow, name: str, asked: frozenset[Scope], days: float | None, by: Principal | None) -> None:
    most = implied(parse_scopes(user.scopes))
    if by is not None:
        most &= by.scopes
    if not asked or asked - most:
        beyond = scopes_text(asked - most) or "none"
        raise ChoiceError(
            f"the scopes of this token must be one or more of `{scopes_text(most) or 'none'}`, got `{beyond}`"
        )
    if user.disabled_at is not None:
        raise ChoiceError(
            f"the user {user.name!r} is disabled, so the service would refuse the token: enable the user first"
        )
    if days is not None and not 0 < days <= _MAX_DAYS:
        raise ChoiceError(
            f"token lifetime must be more than 0 and at most {_MAX_DAYS} days, or unlimited, got {days:g} days"
        )
    if len(name) > MAX_NAME or not name.isprintable():
        raise ChoiceError(f"the name of a token must have at most {MAX_NAME} characters, all of them printable")


def _check_revoke(session: Session, row: ApiTokenRow, by: Principal) -> None:
    held = effective_scopes(row.scopes, session.get_one(UserRow, row.user_id).scopes)
    missing = [scope for scope in reversed(Scope) if scope in held - by.scopes]
    if not missing:
        return
    made_by_it = select(ApiTokenRow.token_id).where(ApiTokenRow.token_id.in_(_family(by.token_id or "")))
    if row.token_id not in session.scalars(made_by_it).all():
        raise MissingScopeError(missing[0], scopes_text(by.scopes))


def _living_parent(session: Session, by: Principal, now: datetime) -> ApiTokenRow | None:
    """Lock and return the existing token with which a new token is created, directly or through a session. The lock
    prevents the existing token's revocation in the meantime.
    """
    if by.token_id is None:
        return None
    parent = session.get(ApiTokenRow, by.token_id, with_for_update=True)
    if parent is None or parent.revoked_at is not None:
        raise NotAuthenticatedError("the token was revoked: ask for a new one", token_sent=True)
    if parent.expires_at is not None and parent.expires_at <= now:
        raise _expired(parent.expires_at)
    return parent


def _expired(at: datetime) -> NotAuthenticatedError:
    return NotAuthenticatedError(f"the token expired at {at:%Y-%m-%d %H:%M} UTC: ask for a new one", token_sent=True)


def _family(token_id: str) -> Select[str]:
    """Select the ids of a token and of all its descendants."""
    family = select(ApiTokenRow.token_id).where(ApiTokenRow.token_id == token_id).cte("family", recursive=True)
    return select(
        family.union_all(
            select(ApiTokenRow.token_id).join(family, ApiTokenRow.parent_id == family.c.token_id)
        ).c.token_id
    )


def _unknown_token(token_id: str) -> NotFoundError:
    return NotFoundError(f"no token has the id {token_id!r}")
