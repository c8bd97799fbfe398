"""Queries of trials and their measurements, for the REST interface."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, Integer, Select, bindparam, select

from steptune.service.alike import record_like
from steptune.service.connections import querying, reading
from steptune.service.messages import TrialAttempt, TrialDetail, TrialSummary
from steptune.service.models import StudyRow, TrialAttemptRow, TrialRow
from steptune.service.queries.packed import packed_rows
from steptune.service.queries.stored import message, parts_of
from steptune.service.queries.studies import Owner
from steptune.service.rows import trial_of
from steptune.tuner.records import Study, Trial, TrialResult, TrialState
from steptune.tuner.store_rules import decode
from steptune.tuner.trial_figures import TrialView

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
    TrialRow.step_time_ns,
    TrialRow.units_per_s,
    TrialRow.num_windows,
    TrialRow.gain,
)


def list_trials(
    engine: Engine, study_id: str, *, state: str | None, limit: int, after: int | None
) -> list[TrialSummary]:
    """List trials with sequence numbers above `after`, in the order in which they began: up to `limit` + 1, so that the
    caller sees if there are more.
    """
    given = {"study_id": study_id, "state": state, "after": after, "limit": limit + 1}
    given = {name: value for name, value in given.items() if value is not None}
    with querying(engine) as connection:
        rows = packed_rows(connection, _listing(frozenset(given)), given)
    return [_summary(*row) for row in rows]


def whole_study(engine: Engine, study_id: str, *, state: str | None = None) -> tuple[Study, list[Trial]] | None:
    """Return the record of a study and the records of its trials, or only of its trials in the given state; trials are
    in the order in which they began.
    """
    query = select(TrialRow).where(TrialRow.study_id == study_id).order_by(TrialRow.sequence)
    if state is not None:
        query = query.where(TrialRow.state == state)
    with reading(engine) as session:
        row = session.get(StudyRow, study_id)
        if row is None:
            return None
        return decode(row.record, Study), [trial_of(t.record, t.state, t.result) for t in session.scalars(query)]


def trial_owner(engine: Engine, trial_id: str) -> Owner:
    """Return the owner of a trial's study, if there is such a trial."""
    with querying(engine) as connection:
        row = connection.execute(_OWNER, {"trial_id": trial_id}).one_or_none()
        return Owner(exists=row is not None, owner_id=None if row is None else row[0])


def list_attempts(engine: Engine, trial_id: str) -> list[TrialAttempt]:
    """List the process starts of a trial."""
    with querying(engine) as connection:
        return [_attempt(found) for found in connection.execute(_ATTEMPTS, {"trial_id": trial_id})]


def trial_detail(view: TrialView, attempts: Sequence[TrialAttempt]) -> TrialDetail:
    """Return the REST form of a trial, without the lists that have resources of their own."""
    trial, result = view.trial, view.trial.result
    shown = result or TrialResult(
        trial_id=trial.trial_id, candidate=trial.candidate, purpose=trial.purpose, group=trial.group
    )
    return record_like(
        TrialDetail,
        view.figures,
        trial,
        shown,
        candidate_key=trial.candidate.key,
        failure_kind=None if shown.failure is None else shown.failure.kind,
        attempts=tuple(attempts),
        guard_passed=None if shown.guard is None else shown.guard.passed,
        isolation=None if result is None else result.isolation,
        interpreter=None if result is None else result.interpreter,
    )


# Making a statement takes longer than running it, so those of reads are made once.
_OWNER = (
    select(StudyRow.owner_id)
    .join(TrialRow, TrialRow.study_id == StudyRow.study_id)
    .where(TrialRow.trial_id == bindparam("trial_id"))
)
_ATTEMPTS = (
    select(
        TrialAttemptRow.number,
        TrialAttemptRow.outcome,
        TrialAttemptRow.worker_id,
        TrialAttemptRow.started_at,
        TrialAttemptRow.ended_at,
    )
    .where(TrialAttemptRow.trial_id == bindparam("trial_id"))
    .order_by(TrialAttemptRow.number)
)


@functools.cache
def _listing(given: frozenset[str]) -> Select[*tuple[Any, ...]]:
    """Return the SQL query that lists a study's trials, restricted by `state` and `after` if they are given."""
    query = select(*_COLUMNS).where(TrialRow.study_id == bindparam("study_id"))
    if "state" in given:
        query = query.where(TrialRow.state == bindparam("state"))
    if "after" in given:
        query = query.where(TrialRow.sequence > bindparam("after"))
    return query.order_by(TrialRow.sequence).limit(bindparam("limit", type_=Integer))


def _summary(  # noqa: PLR0913  a column each
    trial_id: str,
    study_id: str,
    sequence: int,
    candidate_key: str,
    purpose: Any,
    group: str,
    replicate: int,
    state: Any,
    failure_kind: Any,
    stored_record: str,
    step_time_ns: float | None,
    units_per_s: float | None,
    num_windows: int,
    gain: float | None,
) -> TrialSummary:
    """Build a summary from the columns of `_COLUMNS`, in their order."""
    record = parts_of(stored_record)
    return TrialSummary(
        trial_id=trial_id,
        study_id=study_id,
        sequence=sequence,
        candidate=record["candidate"],
        candidate_key=candidate_key,
        purpose=purpose,
        group=group,
        replicate=replicate,
        state=state,
        failure_kind=failure_kind,
        started_at=record["started_at"],
        step_time_ns=step_time_ns,
        units_per_s=units_per_s,
        num_windows=num_windows,
        gain=gain,
    )


def _attempt(row: Any) -> TrialAttempt:
    return message(TrialAttempt, row, outcome=TrialState(row.outcome))
