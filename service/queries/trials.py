"""Trials and what was measured in them, as the interface shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from service.connections import reading
from service.messages import TrialAttempt, TrialDetail, TrialSummary
from service.models import StudyRow, TrialAttemptRow, TrialRow, WindowRow
from service.queries.stored import iso, iso_or_none, parts_of
from service.queries.studies import Owner
from tuner.records import TrialState

_COLUMNS = (
    TrialRow.trial_id,
    TrialRow.study_id,
    TrialRow.sequence,
    TrialRow.candidate_key,
    TrialRow.purpose,
    TrialRow.trial_group,
    TrialRow.replicate,
    TrialRow.state,
    TrialRow.failure_kind,
    TrialRow.record,
)


def list_trials(
    engine: Engine, study_id: str, *, state: str | None, limit: int, after: int | None
) -> list[TrialSummary]:
    """In the order in which they began, from the sequence above `after`; one more than `limit` where there are more."""
    query = select(*_COLUMNS).where(TrialRow.study_id == study_id).order_by(TrialRow.sequence).limit(limit + 1)
    if state is not None:
        query = query.where(TrialRow.state == state)
    if after is not None:
        query = query.where(TrialRow.sequence > after)
    with reading(engine) as session:
        rows = session.execute(query).all()
        measured = _measured(session, [row.trial_id for row in rows])
        return [TrialSummary(**_summary(row, measured)) for row in rows]


def trial_owner(engine: Engine, trial_id: str) -> Owner:
    """Whether there is such a trial, and whose study it belongs to."""
    query = (
        select(StudyRow.owner_id)
        .join(TrialRow, TrialRow.study_id == StudyRow.study_id)
        .where(TrialRow.trial_id == trial_id)
    )
    with reading(engine) as session:
        row = session.execute(query).one_or_none()
        return Owner(exists=row is not None, owner_id=None if row is None else row[0])


def find_trial(engine: Engine, trial_id: str) -> TrialDetail | None:
    """A trial with what came of it, without the lists that have their own place."""
    query = select(*_COLUMNS, TrialRow.result).where(TrialRow.trial_id == trial_id)
    attempts = select(TrialAttemptRow).where(TrialAttemptRow.trial_id == trial_id).order_by(TrialAttemptRow.number)
    with reading(engine) as session:
        row = session.execute(query).one_or_none()
        if row is None:
            return None
        return _detail(row, _measured(session, [trial_id]), [_attempt(found) for found in session.scalars(attempts)])


def _measured(session: Session, trial_ids: Sequence[str]) -> dict[str, Any]:
    """Sums over the clean windows of trials, by trial."""
    query = (
        select(
            WindowRow.trial_id,
            func.count().label("num_windows"),
            func.sum(WindowRow.num_steps).label("num_steps"),
            func.sum(WindowRow.num_units).label("num_units"),
            func.sum(WindowRow.duration_ns).label("duration_ns"),
        )
        .where(WindowRow.trial_id.in_(trial_ids), WindowRow.void.is_(None))
        .group_by(WindowRow.trial_id)
    )
    return {row.trial_id: row for row in session.execute(query)}


def _summary(row: Any, measured: dict[str, Any]) -> dict[str, Any]:
    record = parts_of(row.record)
    sums = measured.get(row.trial_id)
    return {
        "trial_id": row.trial_id,
        "study_id": row.study_id,
        "sequence": row.sequence,
        "candidate": record["candidate"],
        "candidate_key": row.candidate_key,
        "purpose": row.purpose,
        "group": row.trial_group,
        "replicate": row.replicate,
        "state": row.state,
        "failure_kind": row.failure_kind,
        "started_at": record["started_at"],
        "step_time_ns": float(sums.duration_ns / sums.num_steps) if sums is not None and sums.num_steps else None,
        "units_per_s": float(sums.num_units) * 1e9 / float(sums.duration_ns) if sums and sums.duration_ns else None,
        "num_windows": 0 if sums is None else sums.num_windows,
    }


def _detail(row: Any, measured: dict[str, Any], attempts: list[TrialAttempt]) -> TrialDetail:
    result = {} if row.result is None else parts_of(row.result)
    return TrialDetail(
        **_summary(row, measured),
        attempts=tuple(attempts),
        failure=result.get("failure"),
        guard_passed=None if result.get("guard") is None else result["guard"]["passed"],
        startup=result.get("startup"),
        memory=result.get("memory", ()),
        effects=result.get("effects", ()),
        contended=result.get("contended", False),
        isolation=result.get("isolation"),
        interpreter=result.get("interpreter"),
        phases_ns=result.get("phases_ns", {}),
        epoch_restart_ns=result.get("epoch_restart_ns"),
    )


def _attempt(row: TrialAttemptRow) -> TrialAttempt:
    return TrialAttempt(
        number=row.number,
        outcome=TrialState(row.outcome),
        worker_id=row.worker_id,
        started_at=iso(row.started_at),
        ended_at=iso_or_none(row.ended_at),
    )
