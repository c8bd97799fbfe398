"""All studies of an overview, summed by the database: of single studies only the gains are read."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Engine, Select, Text, bindparam, cast, func, select

from steptune.dashboards.fleet import FleetParts, FleetStudies
from steptune.service.connections import querying
from steptune.service.models import HardwareProfileRow, QueueEntryRow, RecommendationRow, StrategyOutcomeRow, StudyRow

_decode = msgspec.json.Decoder(tuple[float, ...]).decode
_SECONDS = func.coalesce(QueueEntryRow.device_seconds, RecommendationRow.tuning_s, 0.0)


@functools.cache
def _studies(dialect: str, owned: bool) -> Select[*tuple[Any, ...]]:
    """By what they have in common. Seconds are those of devices; without a queue, of the search."""
    common = (
        HardwareProfileRow.label,
        RecommendationRow.verdict,
        RecommendationRow.bottleneck_before,
        RecommendationRow.bottleneck_after,
    )
    statement = (
        select(*common, func.count(), func.sum(_SECONDS), _values(RecommendationRow.gain, dialect))
        .select_from(StudyRow)
        .outerjoin(RecommendationRow, RecommendationRow.study_id == StudyRow.study_id)
        .outerjoin(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id)
        .outerjoin(HardwareProfileRow, HardwareProfileRow.fingerprint == StudyRow.hardware_fingerprint)
        .group_by(*common)
    )
    return statement.where(StudyRow.owner_id == bindparam("owner_id")) if owned else statement


@functools.cache
def _parts(dialect: str, owned: bool) -> Select[*tuple[Any, ...]]:
    common = StrategyOutcomeRow.strategy, RecommendationRow.bottleneck_before
    sums = func.count(), func.sum(StrategyOutcomeRow.num_tried), _values(StrategyOutcomeRow.gain, dialect)
    statement = (
        select(*common, *sums)
        .join(RecommendationRow, RecommendationRow.study_id == StrategyOutcomeRow.study_id)
        .group_by(*common)
    )
    if not owned:
        return statement
    return statement.join(StudyRow, StudyRow.study_id == StrategyOutcomeRow.study_id).where(
        StudyRow.owner_id == bindparam("owner_id")
    )


def _values(column: Any, dialect: str) -> ColumnElement[str]:
    """Those of a group that are known, as JSON; NULL or an empty list where there are none."""
    gathered = func.json_group_array(column) if dialect == "sqlite" else func.json_agg(column)
    return cast(gathered.filter(column.is_not(None)), Text)


def fleet_studies(engine: Engine, owner_id: str | None) -> list[FleetStudies]:
    """Those of a user, or all."""
    rows = _rows(engine, _studies(engine.dialect.name, owner_id is not None), owner_id)
    return [FleetStudies._make([*row[:-1], _decode(row[-1] or "[]")]) for row in rows]


def fleet_parts(engine: Engine, owner_id: str | None) -> list[FleetParts]:
    """What came of each strategy in them."""
    rows = _rows(engine, _parts(engine.dialect.name, owner_id is not None), owner_id)
    return [
        FleetParts(strategy, limit, count, int(tried), _decode(gains or "[]"))
        for strategy, limit, count, tried, gains in rows
    ]


def _rows(engine: Engine, statement: Select[*tuple[Any, ...]], owner_id: str | None) -> list[tuple[Any, ...]]:
    with querying(engine) as connection:
        found = connection.execute(statement, {} if owner_id is None else {"owner_id": owner_id})
        return [tuple(row) for row in found]
