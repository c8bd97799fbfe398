"""Queries of events, for streams that follow them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import BigInteger, Engine, FromClause, cast, column, func, select, table

from steptune.service.advisory_locks import EVENT_NUMBERS
from steptune.service.connections import querying, reading
from steptune.service.models import EventRow, StudyRow
from steptune.service.queries.stored import parts_of
from steptune.service.store import NUMBERS_MODULO
from steptune.tuner.records import StudyState

_LOCKS: FromClause = table(
    "pg_locks", *(column(name) for name in ("locktype", "database", "classid", "objid", "objsubid"))
)
_DATABASES: FromClause = table("pg_database", column("oid"), column("datname"))
_FLOORS = select(func.array_agg(cast(_LOCKS.c.objid, BigInteger))).where(
    _LOCKS.c.locktype == "advisory",
    _LOCKS.c.database
    == select(_DATABASES.c.oid).where(_DATABASES.c.datname == func.current_database()).scalar_subquery(),
    _LOCKS.c.classid == EVENT_NUMBERS,
    _LOCKS.c.objsubid == 2,
)
"""Query that returns the numbers in the advisory locks of `steptune.service.store.write_event`, one for each open
transaction that holds such a lock.
"""

ENDED = (StudyState.COMPLETED.value, StudyState.FAILED.value, StudyState.CANCELLED.value)


@dataclass(frozen=True, kw_only=True)
class OwnedEvent:
    """An event, with its owner, who may see it. `record` is its JSON; use `number`, not the sequence in the record."""

    number: int
    study_id: str
    owner_id: str | None
    kind: str
    record: str

    @functools.cached_property
    def json(self) -> bytes:
        """Return an `Event` as JSON; made once for all recipients."""
        return msgspec.json.encode({**parts_of(self.record), "sequence": self.number})


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """Number of the newest committed event, and the number up to which no further event can be committed, over all
    studies.

    Attributes:
        newest: The highest number that is committed.
        final: The highest number up to which nothing more can be committed: below it every event is there for good, or
            never will be.
    """

    newest: int
    final: int


def horizon(engine: Engine) -> Horizon:
    """Return the numbers of the newest committed event and of the last event up to which no further one can be
    committed.

    SQLite has one writer at a time, so numbers are committed in their order. On PostgreSQL a transaction may commit
    after one that drew a later number. Each holds a lock from before it draws its number until after its commit, which
    says above which number that will be (`steptune.service.store.write_event`). The newest number is read in
    a snapshot that is older than the look at the locks: a transaction that holds none by then has committed, or draws a
    later number.
    """
    newest = select(func.coalesce(func.max(EventRow.event_id), 0)).scalar_subquery()
    with querying(engine) as connection:
        if connection.dialect.name != "postgresql":
            number = connection.scalar(select(newest)) or 0
            return Horizon(newest=number, final=number)
        number, floors = connection.execute(select(newest, _FLOORS.scalar_subquery())).one()
    return Horizon(newest=number, final=min([number, *(_nearest(number, floor) for floor in floors or ())]))


def _nearest(number: int, remainder: int) -> int:
    """Return the number nearest to `number` that has this remainder modulo `NUMBERS_MODULO`."""
    half = NUMBERS_MODULO // 2
    return number + (remainder - number + half) % NUMBERS_MODULO - half


def newest_number(engine: Engine, study_id: str) -> int:
    """Return the number of a study's last event; 0 if there is none."""
    with querying(engine) as connection:
        return connection.scalar(select(func.max(EventRow.event_id)).where(EventRow.study_id == study_id)) or 0


def events_after(
    engine: Engine,
    after: int,
    limit: int,
    *,
    until: int | None = None,
    study_id: str | None = None,
    owner_id: str | None = None,
) -> list[OwnedEvent]:
    """Return at most `limit` events with numbers above `after`, in order.

    Args:
        until: The last number to return.
        study_id: Study of the events; None for all.
        owner_id: Owner of their studies; None for all.
    """
    query = (
        select(EventRow.event_id, EventRow.study_id, EventRow.owner_id, EventRow.kind, EventRow.record)
        .where(EventRow.event_id > after)
        .order_by(EventRow.event_id)
        .limit(limit)
    )
    if until is not None:
        query = query.where(EventRow.event_id <= until)
    if study_id is not None:
        query = query.where(EventRow.study_id == study_id)
    if owner_id is not None:
        query = query.where(EventRow.owner_id == owner_id)
    with reading(engine) as session:
        return [
            OwnedEvent(number=row[0], study_id=row[1], owner_id=row[2], kind=row[3], record=row[4])
            for row in session.execute(query)
        ]


def ended_studies(engine: Engine, study_ids: Sequence[str]) -> set[str]:
    """Return which of the given studies have ended, including deleted ones."""
    if not study_ids:
        return set()
    wanted = set(study_ids)
    with reading(engine) as session:
        query = select(StudyRow.study_id).where(StudyRow.study_id.in_(wanted), StudyRow.state.not_in(ENDED))
        return wanted - set(session.scalars(query))


def is_over(engine: Engine, study_id: str, after: int) -> bool:
    """Say whether a study has ended and has no event above a number."""
    if not ended_studies(engine, [study_id]):
        return False
    return not events_after(engine, after, 1, study_id=study_id)
