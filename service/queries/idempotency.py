"""Stored answers to requests that may be sent again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, delete, update
from sqlalchemy.dialects import postgresql, sqlite

from steptune.service.connections import writing
from steptune.service.models import IdempotencyKeyRow

_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """An earlier request with the same key.

    Attributes:
        status: HTTP status of its answer; None while it is running.
    """

    request_sha256: str
    status: int | None
    headers: str | None
    body: bytes | None


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Successful claim of a key by this request.

    Attributes:
        new_id: Id for the thing that the request creates.
    """

    request_sha256: str
    new_id: str


def take(
    engine: Engine,
    user_id: str,
    key: str,
    mine: Taken,
    now: datetime,
    *,
    forget_before: datetime,
    stale_before: datetime,
) -> Taken | Earlier:
    """Take a key, or return the earlier request that holds it.

    Args:
        forget_before: Keys of this age are free again.
        stale_before: A request of this age without an answer died with its process; its repetition takes over.
    """
    with writing(engine) as session:
        session.execute(delete(IdempotencyKeyRow).where(IdempotencyKeyRow.created_at < forget_before))
        insert = _INSERTS[engine.dialect.name](IdempotencyKeyRow).values(
            user_id=user_id, key=key, request_sha256=mine.request_sha256, headers=mine.new_id, created_at=now
        )
        row = None
        while row is None:  # on PostgreSQL who had the key may give it back at this moment
            taken = session.execute(insert.on_conflict_do_nothing().returning(IdempotencyKeyRow.key)).one_or_none()
            if taken is not None:
                return mine
            row = session.get(IdempotencyKeyRow, (user_id, key), with_for_update=True)
        if row.status is None and row.created_at < stale_before and row.request_sha256 == mine.request_sha256:
            row.created_at = now
            return Taken(request_sha256=row.request_sha256, new_id=row.headers or mine.new_id)
        return Earlier(request_sha256=row.request_sha256, status=row.status, headers=row.headers, body=row.body)


def keep(engine: Engine, user_id: str, key: str, status: int, headers: str, body: bytes) -> None:
    """Store the answer of the request that holds the key."""
    mine = (IdempotencyKeyRow.user_id == user_id, IdempotencyKeyRow.key == key)
    with writing(engine) as session:
        session.execute(update(IdempotencyKeyRow).where(*mine).values(status=status, headers=headers, body=body))


def give_back(engine: Engine, user_id: str, key: str) -> None:
    """Free the key of a refused request, so that the request may be sent again."""
    mine = (IdempotencyKeyRow.user_id == user_id, IdempotencyKeyRow.key == key, IdempotencyKeyRow.status.is_(None))
    with writing(engine) as session:
        session.execute(delete(IdempotencyKeyRow).where(*mine))
