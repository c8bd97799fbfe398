"""Aggregates over all studies for the overview, computed by the database. Only the gains are read for each study.

Studies are summed in blocks, by the last character of their ids, which is random. A process caches the sums:
after a change it recomputes only the blocks whose studies changed.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Engine, Select, Text, bindparam, cast, func, select

from steptune.dashboards.fleet import FleetParts, FleetStudies
from steptune.service.connections import querying
from steptune.service.kept import Kept
from steptune.service.models import HardwareProfileRow, QueueEntryRow, RecommendationRow, StrategyOutcomeRow, StudyRow
from steptune.service.queries.versions import block_of, block_versions

NUM_OWNERS = 64
"""Maximum number of owners for whom a process caches sums; the least recently used are dropped first."""
_decode = msgspec.json.Decoder(tuple[float, ...]).decode
_SECONDS = func.coalesce(QueueEntryRow.device_seconds, RecommendationRow.tuning_s, 0.0)


@dataclass
class Block:
    """Cached sums over the studies of one block, with the version of the sums. A block contains the studies whose ids
    end with the same character.
    """

    version: Hashable
    studies: list[FleetStudies]
    parts: list[FleetParts]


class FleetSums:
    """Cache of the sums for the overviews of a process; several threads may use it."""

    def __init__(self) -> None:
        self._owners: Kept[dict[str, Block]] = Kept(NUM_OWNERS)

    def read(self, engine: Engine, owner_id: str | None) -> tuple[list[FleetStudies], list[FleetParts]]:
        """Return a user's studies, or all studies, grouped by common properties, and the outcomes of each strategy in
        these studies.
        """
        versions = block_versions(engine, owner_id)  # before the sums, which are of this version or a later one
        kept = self._owners.get(owner_id) or {}
        blocks = {name: kept[name] for name, version in versions.items() if _is_of(kept.get(name), version)}
        changed = versions.keys() - blocks.keys()
        if changed:
            blocks |= _summed(engine, owner_id, {name: versions[name] for name in changed})
        self._owners.put(owner_id, blocks, 1)
        found = blocks.values()
        return [s for block in found for s in block.studies], [p for block in found for p in block.parts]


def _is_of(block: Block | None, version: Hashable) -> bool:
    return block is not None and block.version == version


def _summed(engine: Engine, owner_id: str | None, versions: dict[str, Hashable]) -> dict[str, Block]:
    blocks = {name: Block(version, [], []) for name, version in versions.items()}
    asked = engine.dialect.name, owner_id is not None
    for name, hardware, verdict, before, after, count, seconds, gains in _rows(
        engine, _studies(*asked), owner_id, blocks
    ):
        if name in blocks:
            found = _decode(gains or "[]")
            blocks[name].studies.append(FleetStudies(hardware, verdict, before, after, count, seconds, found))
    for name, strategy, limit, count, tried, gains in _rows(engine, _parts(*asked), owner_id, blocks):
        if name in blocks:
            blocks[name].parts.append(FleetParts(strategy, limit, count, int(tried), _decode(gains or "[]")))
    return blocks


@functools.cache
def _studies(dialect: str, owned: bool) -> Select[*tuple[Any, ...]]:
    """Select studies grouped by their common properties. Seconds are device seconds or, without a queue, seconds of the
    search.
    """
    common = (
        block_of(StudyRow.study_id).label("block"),
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
        .where(StudyRow.study_id.in_(_members(owned)))
        .group_by(*common)
    )
    return statement


@functools.cache
def _parts(dialect: str, owned: bool) -> Select[*tuple[Any, ...]]:
    common = (
        block_of(StrategyOutcomeRow.study_id).label("block"),
        StrategyOutcomeRow.strategy,
        RecommendationRow.bottleneck_before,
    )
    sums = func.count(), func.sum(StrategyOutcomeRow.num_tried), _values(StrategyOutcomeRow.gain, dialect)
    return (
        select(*common, *sums)
        .join(RecommendationRow, RecommendationRow.study_id == StrategyOutcomeRow.study_id)
        .where(StrategyOutcomeRow.study_id.in_(_members(owned)))
        .group_by(*common)
    )


def _members(owned: bool) -> Select[*tuple[Any, ...]]:
    """Select the ids of the studies in the blocks that the parameter `blocks` lists; if `owned` is true, only one
    owner's.
    """
    members = select(StudyRow.study_id).where(block_of(StudyRow.study_id).in_(bindparam("blocks", expanding=True)))
    return members.where(StudyRow.owner_id == bindparam("owner_id")) if owned else members


def _values(column: Any, dialect: str) -> ColumnElement[str]:
    """Aggregate the known values of a group as JSON; NULL or an empty list where there are none."""
    gathered = func.json_group_array(column) if dialect == "sqlite" else func.json_agg(column)
    return cast(gathered.filter(column.is_not(None)), Text)


def _rows(
    engine: Engine, statement: Select[*tuple[Any, ...]], owner_id: str | None, blocks: Iterable[str]
) -> list[tuple[Any, ...]]:
    asked = {"blocks": list(blocks)} | ({} if owner_id is None else {"owner_id": owner_id})
    with querying(engine) as connection:
        return [tuple(row) for row in connection.execute(statement, asked)]
