"""The audit log: who did what, on which target, and with which outcome. Rows are never changed, and are removed only by
age.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Engine, select

from steptune.service.access.principal import Principal
from steptune.service.access.secrets import without_secrets
from steptune.service.access.tokens import utc_now
from steptune.service.alike import record_like
from steptune.service.connections import reading, writing
from steptune.service.models import AuditRow
from steptune.tuner.records import Record

MAX_TEXT = 500
"""Maximum characters of one text in a row: a client's input must not make the log large."""


class AuditEntry(Record):
    """Entry of the audit log.

    Attributes:
        entry_id: Number that grows with time.
        at: Time of the action.
        user_id: The user who acted; null for what the service did by itself, and before authentication.
        token_id: The token used.
        action: Name of the operation.
        target: Target of the operation: a path, or an id.
        outcome: "done", "failed", or the code of the refusal.
        request_id: Id of the request in the service's log.
        detail: Further details, by name.
    """

    entry_id: int
    at: datetime
    user_id: str | None
    token_id: str | None
    action: str
    target: str
    outcome: str
    request_id: str
    detail: dict[str, Any]


class AuditLog:
    """The audit log in the database. All queries of the table are here.

    Args:
        engine: Engine of a database whose schema has been checked.
        clock: Returns the current time.
    """

    def __init__(self, engine: Engine, clock: Callable[[], datetime] = utc_now) -> None:
        self._engine = engine
        self._clock = clock

    def record(
        self,
        principal: Principal | None,
        *,
        action: str,
        target: str,
        outcome: str,
        request_id: str = "",
        detail: Mapping[str, object] | None = None,
    ) -> None:
        """Add an entry.

        Args:
            principal: Who acted; None for an action of the service itself, and before authentication.
            action: Name of the action, a verb and a noun: "create_token".
            target: Id or path of the target of the action.
            outcome: "done", "refused", or another result.
            request_id: Id of the HTTP request.
            detail: Further details, as plain values by name.
        """
        row = AuditRow(
            at=self._clock(),
            user_id=None if principal is None else principal.user_id,
            token_id=None if principal is None else principal.token_id,
            action=action,
            target=_short(target),
            outcome=outcome,
            request_id=_short(request_id),
            detail=msgspec.json.encode({key: _plain(value) for key, value in (detail or {}).items()}).decode(),
        )
        with writing(self._engine) as session:
            session.add(row)

    def page(self, *, limit: int, before: int | None = None, user_id: str | None = None) -> list[AuditEntry]:
        """Return entries older than `before`, of one user or of all, the newest first."""
        query = select(AuditRow).order_by(AuditRow.entry_id.desc()).limit(limit)
        if before is not None:
            query = query.where(AuditRow.entry_id < before)
        if user_id is not None:
            query = query.where(AuditRow.user_id == user_id)
        with reading(self._engine) as session:
            return [_entry_of(row) for row in session.scalars(query)]


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float) else _short(str(value))


def _short(text: str) -> str:
    """Return a text shortened to fit a row, without secrets, and without NUL characters, which PostgreSQL refuses."""
    return without_secrets(text).replace("\x00", "�")[:MAX_TEXT]


def _entry_of(row: AuditRow) -> AuditEntry:
    return record_like(AuditEntry, row, detail=msgspec.json.decode(row.detail))
