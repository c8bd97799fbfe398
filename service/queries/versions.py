"""Versions of the pages' content: an equal version means that nothing on the page has changed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from sqlalchemy import ColumnElement, Engine, bindparam, case, func, select
from sqlalchemy.orm import InstrumentedAttribute

from steptune.service.connections import querying
from steptune.service.models import HardwareProfileRow, QueueEntryRow, StudyRow, TrialRow
from steptune.tuner.records import StudyState


def block_of(study_id: ColumnElement[str] | InstrumentedAttribute[str]) -> ColumnElement[str]:
    """Return the block of a study: the last character of its id, which is random, so that studies are spread evenly
    over 32 blocks.
    """
    return func.substr(study_id, func.length(study_id))


_COLUMNS = (StudyRow.revision, StudyRow.state, QueueEntryRow.version, QueueEntryRow.device_seconds)
_STUDY = (
    select(*_COLUMNS)
    .outerjoin(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id)
    .where(StudyRow.study_id == bindparam("study_id"))
)
_TRIAL = (
    select(TrialRow.study_id, *_COLUMNS)
    .join(StudyRow, StudyRow.study_id == TrialRow.study_id)
    .outerjoin(QueueEntryRow, QueueEntryRow.study_id == StudyRow.study_id)
    .where(TrialRow.trial_id == bindparam("trial_id"))
)
_UNDER_WAY = (StudyState.QUEUED.value, StudyState.RUNNING.value)
_settled = case((StudyRow.state.in_(_UNDER_WAY), 0), else_=StudyRow.revision)
_FLEET = select(
    func.count().label("studies"),
    func.sum(case((StudyRow.state == StudyState.RUNNING.value, 1), else_=0)).label("running"),
    func.sum(case((StudyRow.state == StudyState.QUEUED.value, 1), else_=0)).label("queued"),
    func.sum(_settled).label("revisions"),
    func.sum(_settled * _settled).label("squares"),
)
_OWN_FLEET = _FLEET.where(StudyRow.owner_id == bindparam("owner_id"))
_BLOCKS = select(
    block_of(StudyRow.study_id).label("block"),
    StudyRow.state,
    func.count(),
    func.max(StudyRow.study_id),
    func.sum(StudyRow.revision),
    func.sum(StudyRow.revision * StudyRow.revision),
).group_by("block", StudyRow.state)
_OWN_BLOCKS = _BLOCKS.where(StudyRow.owner_id == bindparam("owner_id"))
_NUM_PROFILES = select(func.count()).select_from(HardwareProfileRow)


def study_version(engine: Engine, study_id: str) -> Hashable:
    """Return the version of a study's page: the study's revision, and the version of its queue entry."""
    with querying(engine) as connection:
        row = connection.execute(_STUDY, {"study_id": study_id}).one_or_none()
        return None if row is None else tuple(row)


def trial_version(engine: Engine, trial_id: str) -> tuple[str, Hashable]:
    """Return the study of an existing trial, and the version of the trial's page, which is its study's version."""
    with querying(engine) as connection:
        study_id, *version = connection.execute(_TRIAL, {"trial_id": trial_id}).one()
        return study_id, tuple(version)


def fleet_version(engine: Engine, owner_id: str | None) -> Hashable:
    """Return the version of the overview of a user's studies, or of all studies; reads an index only.

    An overview shows answers and costs. A study under way has none yet, so its revisions do not count; its arrival,
    its begin and its end do.
    """
    newest = select(func.max(StudyRow.study_id))
    with querying(engine) as connection:
        if owner_id is None:
            sums = connection.execute(_FLEET).one()
        else:
            sums = connection.execute(_OWN_FLEET, {"owner_id": owner_id}).one()
            newest = newest.where(StudyRow.owner_id == owner_id)
        return (*sums, connection.scalar(newest), connection.scalar(_NUM_PROFILES))


def block_versions(engine: Engine, owner_id: str | None) -> dict[str, Hashable]:
    """Return the versions of the blocks of studies that an overview shows, by block. A version has the same meaning as
    in `fleet_version`.
    """
    asked = (_BLOCKS, {}) if owner_id is None else (_OWN_BLOCKS, {"owner_id": owner_id})
    with querying(engine) as connection:
        num_profiles = connection.scalar(_NUM_PROFILES)
        rows = connection.execute(*asked).all()
    found: dict[str, list[tuple[Any, ...]]] = {}
    for block, state, count, newest, *revisions in rows:
        sums = () if state in _UNDER_WAY else revisions
        found.setdefault(block, []).append((state, count, newest, *sums))
    return {block: (num_profiles, *sorted(states)) for block, states in found.items()}
