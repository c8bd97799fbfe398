"""The users: their names, scopes and limits. All queries of the table are here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from steptune.service.access.errors import NameTakenError, NotFoundError
from steptune.service.access.known import KnownTokens
from steptune.service.alike import record_like
from steptune.service.connections import reading, writing
from steptune.service.models import BrowserSessionRow, UserRow
from steptune.service.settings.scopes import Scope, parse_scopes, scopes_text
from steptune.tuner.errors import ChoiceError
from steptune.tuner.records import Record, new_id

MAX_NAME = 200
_NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]+( [^\s\x00-\x1f\x7f-\x9f]+)*")
LIMITS = ("max_running", "max_queued", "max_device_hours", "max_artifact_bytes")
MAX_PRIORITY = 1000
_MAX_COUNT = 2**63 - 1


class User(Record):
    """A user. A limit that is null means the default of the settings.

    Attributes:
        user_id: Sortable by time.
        name: Unique name; that at the proxy or identity provider, if they log in there.
        scopes: Maximum scopes of their tokens and sessions.
        priority: Priority of their studies; higher ones are run first.
        max_running: Maximum studies that run at once.
        max_queued: Maximum studies that wait.
        max_device_hours: Maximum device hours in 30 days.
        max_artifact_bytes: Maximum bytes of uploads, traces and logs.
        created_at: When they were made.
        disabled_at: When they were disabled; null if they are not.
    """

    user_id: str
    name: str
    scopes: list[str]
    priority: int
    max_running: int | None
    max_queued: int | None
    max_device_hours: float | None
    max_artifact_bytes: int | None
    created_at: datetime
    disabled_at: datetime | None


class UserStore:
    """Users in the database.

    Args:
        engine: Engine of a database whose schema has been checked.
        known: Cache of recently valid tokens, which is emptied when users change.
    """

    def __init__(self, engine: Engine, known: KnownTokens | None = None) -> None:
        self._engine = engine
        self._known = known or KnownTokens(0)

    def create(self, name: str, scopes: Iterable[Scope], **changes: Any) -> User:
        """Create a user; `changes` has the same values as for `UserStore.change`.

        Raises:
            NameTakenError: Another user has the name.
            ChoiceError: The name is empty, too long, or has control characters.
        """
        with writing(self._engine) as session:
            row = add_user(session, name, scopes)
            _apply(row, changes)
            return user_of(row)

    def change(self, user_id: str, check: Callable[[User], None] | None = None, **changes: Any) -> User:
        """Set scopes, priority or limits; `disabled=True` ends all the user's sessions and refuses their tokens.

        Args:
            user_id: Id of the user.
            check: Function that raises an error if the user, as they are now, must not be changed.
            changes: New values by name.

        Raises:
            NotFoundError: No user has this id.
            ChoiceError: A limit below zero, or no administrator would be left.
        """
        with writing(self._engine) as session:
            row = session.get(UserRow, user_id, with_for_update=True)
            if row is None:
                raise unknown_user(user_id)
            if check is not None:
                check(user_of(row))
            was_administrator = _administers(row)
            _apply(row, changes)
            session.flush()
            if was_administrator and not _administers(row):
                _check_administrators(session)
            if row.disabled_at is not None:
                session.execute(delete(BrowserSessionRow).where(BrowserSessionRow.user_id == user_id))
            changed = user_of(row)
        self._known.forget()
        return changed

    def get(self, user_id: str) -> User:
        """Return a user by id.

        Raises:
            NotFoundError: No user has this id.
        """
        with reading(self._engine) as session:
            row = session.get(UserRow, user_id)
            if row is None:
                raise unknown_user(user_id)
            return user_of(row)

    def named(self, name: str) -> User:
        """Return a user by name.

        Raises:
            NotFoundError: No user has this name.
        """
        with reading(self._engine) as session:
            row = session.scalar(select(UserRow).where(UserRow.name == name))
            if row is None:
                raise NotFoundError(f"no user is called {name!r}: `steptune user list` shows all")
            return user_of(row)

    def first_administrator(self, *, but: str) -> User | None:
        """Return the oldest enabled administrator, except the user with the name `but`."""
        enabled = select(UserRow).where(UserRow.disabled_at.is_(None), UserRow.name != but)
        with reading(self._engine) as session:
            rows = session.scalars(enabled.order_by(UserRow.user_id))
            return next((user_of(row) for row in rows if _administers(row)), None)

    def page(self, *, limit: int, before: str | None = None) -> list[User]:
        """Return users created before the user `before`, the newest first."""
        query = select(UserRow).order_by(UserRow.user_id.desc()).limit(limit)
        if before is not None:
            query = query.where(UserRow.user_id < before)
        with reading(self._engine) as session:
            return [user_of(row) for row in session.scalars(query)]


def add_user(session: Session, name: str, scopes: Iterable[Scope]) -> UserRow:
    """Add a user in a transaction.

    Raises:
        NameTakenError, ChoiceError: As `UserStore.create`.
    """
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ChoiceError(
            f"{name[:MAX_NAME]!r} is not a valid user name: use 1 to {MAX_NAME} printable characters, with only "
            "single spaces, and none at the ends"
        )
    if session.scalar(select(UserRow.user_id).where(UserRow.name == name)) is not None:
        raise _taken(name)
    row = UserRow(user_id=new_id(), name=name, scopes=scopes_text(scopes), priority=0, created_at=datetime.now(UTC))
    session.add(row)
    try:
        session.flush()
    except IntegrityError as error:  # another process made it at this moment
        raise _taken(name) from error
    return row


def user_of(row: UserRow) -> User:
    return record_like(User, row, scopes=row.scopes.split())


def unknown_user(user_id: str) -> NotFoundError:
    return NotFoundError(f"no user has the id {user_id!r}")


def _taken(name: str) -> NameTakenError:
    return NameTakenError(f"the user name {name!r} is taken: choose another name")


def _apply(row: UserRow, changes: Mapping[str, Any]) -> None:
    """Set the columns that `changes` names.

    Raises:
        ChoiceError: A limit below zero or beyond what the database counts.
    """
    for name, value in changes.items():
        if name == "scopes":
            row.scopes = scopes_text(value)
        elif name == "disabled":
            row.disabled_at = (row.disabled_at or datetime.now(UTC)) if value else None
        else:
            assert name in (*LIMITS, "priority"), name
            _check_number(name, value)
            setattr(row, name, value)


def _check_number(name: str, value: float | None) -> None:
    lowest = -MAX_PRIORITY if name == "priority" else 0
    highest = MAX_PRIORITY if name == "priority" else _MAX_COUNT
    if value is not None and not lowest <= value <= highest:
        raise ChoiceError(f"{name} = {value}: it lies between {lowest} and {highest}")


def _administers(row: UserRow) -> bool:
    return row.disabled_at is None and Scope.ADMIN in parse_scopes(row.scopes)


def _check_administrators(session: Session) -> None:
    rows = session.scalars(select(UserRow).where(UserRow.disabled_at.is_(None), UserRow.scopes.contains("admin")))
    if not any(_administers(row) for row in rows):
        raise ChoiceError("no administrator would be left: give another user the scope `admin` first")
