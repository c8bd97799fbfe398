"""Queries for the web list of studies: the list can be searched, filtered and sorted, and shows each study's result."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Engine, Select, and_, case, func, or_, select

from steptune.dashboards.studies_list import ListedStudy
from steptune.service.connections import querying
from steptune.service.models import HardwareProfileRow, QueueEntryRow, RecommendationRow, StudyRow
from steptune.service.queries.stored import iso
from steptune.tuner.records import Verdict


@dataclass(frozen=True, kw_only=True)
class ListQuery:
    """Filters, order and cursor of the list of studies; an empty filter accepts every study.

    Attributes:
        owner_id: Owner of the listed studies; None for all.
        text: A part of the workload, the title, the notes or the id.
        tag: A tag of the study.
        state: State of the study.
        hardware: Label of the hardware profile.
        bottleneck: Bottleneck before tuning.
        sort: A key of `steptune.dashboards.studies_list.SORTS`.
        cursor: Cursor of the page, from `ListedPage.next_cursor`.
    """

    owner_id: str | None
    text: str = ""
    state: str = ""
    hardware: str = ""
    bottleneck: str = ""
    tag: str = ""
    sort: str = "newest"
    cursor: str = ""


class ListedPage(NamedTuple):
    """One page of the list of studies; `next_cursor` is empty on the last page."""

    studies: tuple[ListedStudy, ...]
    next_cursor: str


def list_page(engine: Engine, wanted: ListQuery, limit: int) -> ListedPage:
    """Return a page of the list of studies.

    Raises:
        ValueError: The cursor belongs to another list.
    """
    value = _SORT_VALUES[wanted.sort]
    query = _filtered(_COLUMNS.add_columns(value.label("sorted_by")), wanted)
    if wanted.cursor:
        query = query.where(_after(wanted.sort, value, _decode(wanted.cursor)))
    ascending = wanted.sort == "workload"
    query = query.order_by(value.asc() if ascending else value.desc(), StudyRow.study_id.desc()).limit(limit + 1)
    with querying(engine) as connection:
        rows = connection.execute(query).all()
    more = len(rows) > limit
    last = rows[limit - 1] if more else None
    cursor = "" if last is None else _encode([last.sorted_by, last.study_id])
    return ListedPage(tuple(_listed(row) for row in rows[:limit]), cursor)


def num_by_state(engine: Engine, owner_id: str | None) -> dict[str, int]:
    """Return the number of studies in each state."""
    query = select(StudyRow.state, func.count()).group_by(StudyRow.state)
    if owner_id is not None:
        query = query.where(StudyRow.owner_id == owner_id)
    with querying(engine) as connection:
        return {row[0]: row[1] for row in connection.execute(query)}


def hardware_labels(engine: Engine) -> Sequence[str]:
    """Return the labels of the hardware on which studies ran."""
    query = select(HardwareProfileRow.label).distinct().order_by(HardwareProfileRow.label)
    with querying(engine) as connection:
        return connection.scalars(query).all()


_COLUMNS = (
    select(
        StudyRow.study_id,
        StudyRow.title,
        StudyRow.workload,
        StudyRow.state,
        StudyRow.created_at,
        HardwareProfileRow.label,
        RecommendationRow.verdict,
        RecommendationRow.gain,
        RecommendationRow.bottleneck_before,
        RecommendationRow.bottleneck_after,
        RecommendationRow.tuning_s,
        QueueEntryRow.device_seconds,
        StudyRow.tags,
        StudyRow.notes,
    )
    .outerjoin(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id)
    .outerjoin(RecommendationRow, RecommendationRow.study_id == StudyRow.study_id)
    .outerjoin(HardwareProfileRow, HardwareProfileRow.fingerprint == StudyRow.hardware_fingerprint)
)
_SORT_VALUES: dict[str, Any] = {
    "newest": StudyRow.study_id,
    "gain": func.coalesce(case((RecommendationRow.verdict == Verdict.FASTER.value, RecommendationRow.gain)), -1.0),
    "cost": func.coalesce(RecommendationRow.tuning_s, -1.0),
    "workload": func.lower(StudyRow.workload),
}


def _filtered(query: Select[Any], wanted: ListQuery) -> Select[Any]:
    columns = {
        StudyRow.owner_id: wanted.owner_id,
        StudyRow.state: wanted.state,
        HardwareProfileRow.label: wanted.hardware,
        RecommendationRow.bottleneck_before: wanted.bottleneck,
    }
    for column, value in columns.items():
        if value:
            query = query.where(column == value)
    if wanted.tag:
        query = query.where(StudyRow.tags.contains(f" {wanted.tag} ", autoescape=True))
    if wanted.text:
        text = wanted.text.lower()
        searched = (
            func.lower(StudyRow.workload),
            func.lower(StudyRow.title),
            func.lower(StudyRow.notes),
            StudyRow.study_id,
        )
        query = query.where(or_(*(column.contains(text, autoescape=True) for column in searched)))
    return query


def _after(sort: str, value: ColumnElement[Any], place: tuple[Any, str]) -> ColumnElement[bool]:
    last, study_id = place
    beyond = value > last if sort == "workload" else value < last
    return or_(beyond, and_(value == last, StudyRow.study_id < study_id))


def _encode(place: list[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def _decode(cursor: str) -> tuple[Any, str]:
    try:
        found = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
        value, study_id = found
    except (binascii.Error, ValueError, TypeError):
        raise ValueError(
            f"the cursor {cursor!r} is not a position in this list: take it from the previous page, or leave it out"
        ) from None
    if not isinstance(value, str | float | int) or not isinstance(study_id, str):
        raise ValueError(
            f"the cursor {cursor!r} is not a position in this list: take it from the previous page, or leave it out"
        )
    return value, study_id


def _listed(row: Any) -> ListedStudy:
    return ListedStudy(
        study_id=row.study_id,
        title=row.title,
        workload=row.workload,
        state=row.state,
        created_at=iso(row.created_at),
        hardware=row.label,
        verdict=row.verdict,
        gain=row.gain,
        bottleneck_before=row.bottleneck_before,
        bottleneck_after=row.bottleneck_after,
        tuning_s=row.tuning_s,
        device_hours=None if row.device_seconds is None else row.device_seconds / 3600,
        tags=tuple(row.tags.split()),
        notes=row.notes,
        submitted=row.device_seconds is not None,
    )
