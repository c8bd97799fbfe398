"""Events, as they are followed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import Engine, func, select

from steptune.service.connections import querying, reading
from steptune.service.models import EventRow, StudyRow
from steptune.service.queries.stored import parts_of
from steptune.tuner.records import StudyState

ENDED = (StudyState.COMPLETED.value, StudyState.FAILED.value, StudyState.CANCELLED.value)


@dataclass(frozen=True, kw_only=True)
class OwnedEvent:
    """An event and who may see it. `record` is its JSON; its sequence there means nothing, `number` does."""

    number: int
    study_id: str
    owner_id: str | None
    kind: str
    record: str

    @functools.cached_property
    def json(self) -> bytes:
        """An `Event`; made once for all who get it."""
        return msgspec.json.encode({**parts_of(self.record), "sequence": self.number})


def newest_numbers(engine: Engine, window: int) -> list[int]:
    """The numbers of events, in order, that are less than `window` below the highest one."""
    highest = select(func.max(EventRow.event_id)).scalar_subquery()
    query = select(EventRow.event_id).where(EventRow.event_id > highest - window).order_by(EventRow.event_id)
    with reading(engine) as session:
        return list(session.scalars(query))


def newest_number(engine: Engine, study_id: str | None = None) -> int:
    """The number of the last event, of a study or of all; 0 before there is one."""
    query = select(func.max(EventRow.event_id))
    if study_id is not None:
        query = query.where(EventRow.study_id == study_id)
    with querying(engine) as connection:
        return connection.scalar(query) or 0


def events_after(
    engine: Engine,
    after: int,
    limit: int,
    *,
    until: int | None = None,
    study_id: str | None = None,
    owner_id: str | None = None,
) -> list[OwnedEvent]:
    """At most `limit` events with numbers above `after`, in order.

    Args:
        until: The last number that is wanted.
        study_id: Of this study only.
        owner_id: Of this user's studies only.
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
    """Those of these studies that will do nothing more, deleted ones included."""
    if not study_ids:
        return set()
    wanted = set(study_ids)
    with reading(engine) as session:
        query = select(StudyRow.study_id).where(StudyRow.study_id.in_(wanted), StudyRow.state.not_in(ENDED))
        return wanted - set(session.scalars(query))


def is_over(engine: Engine, study_id: str, after: int) -> bool:
    """Whether a study has ended and has no event above a number."""
    if not ended_studies(engine, [study_id]):
        return False
    return not events_after(engine, after, 1, study_id=study_id)
