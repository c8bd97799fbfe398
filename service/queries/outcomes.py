"""Outcomes of a study: findings, decisions, its recommendation, its files."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, and_, or_, select

from steptune.service.connections import reading
from steptune.service.messages import ArtifactInfo, TrialFinding
from steptune.service.models import ArtifactRow, DecisionRow, FindingRow, RecommendationRow, TrialRow
from steptune.service.queries.stored import message, stored
from steptune.tuner.records import Recommendation
from steptune.tuner.store_rules import decode


def list_findings(
    engine: Engine, study_id: str, *, limit: int, after: tuple[int, int] | None
) -> list[tuple[int, int, TrialFinding]]:
    """List findings, each with its trial's sequence number and its own number, the newest trial first. `after` is the
    last such pair of the previous page of results.
    """
    query = (
        select(TrialRow.sequence, FindingRow.number, FindingRow.trial_id, FindingRow.record)
        .join(FindingRow, FindingRow.trial_id == TrialRow.trial_id)
        .where(TrialRow.study_id == study_id)
        .order_by(TrialRow.sequence.desc(), FindingRow.number)
        .limit(limit + 1)
    )
    if after is not None:
        sequence, number = after
        same_trial = and_(TrialRow.sequence == sequence, FindingRow.number > number)
        query = query.where(or_(TrialRow.sequence < sequence, same_trial))
    with reading(engine) as session:
        return [
            (row.sequence, row.number, TrialFinding(trial_id=row.trial_id, finding=stored(row.record)))
            for row in session.execute(query)
        ]


def list_decisions(engine: Engine, study_id: str, *, limit: int, after: int | None) -> list[tuple[int, Any]]:
    """List decisions with their sequence numbers, in the order of the search. Up to `limit` + 1 are returned, so that
    the caller sees if there are more.
    """
    query = (
        select(DecisionRow.sequence, DecisionRow.record)
        .where(DecisionRow.study_id == study_id)
        .order_by(DecisionRow.sequence)
        .limit(limit + 1)
    )
    if after is not None:
        query = query.where(DecisionRow.sequence > after)
    with reading(engine) as session:
        return [(sequence, stored(record)) for sequence, record in session.execute(query)]


def recommendation_text(engine: Engine, study_id: str) -> str | None:
    """Return the stored recommendation of a study; None if it has none."""
    with reading(engine) as session:
        return session.scalar(select(RecommendationRow.record).where(RecommendationRow.study_id == study_id))


def recommendation_of(engine: Engine, study_id: str) -> Recommendation | None:
    text = recommendation_text(engine, study_id)
    return None if text is None else decode(text, Recommendation)


def list_artifacts(
    engine: Engine, *, study_id: str | None = None, trial_id: str | None = None, limit: int, after: int | None
) -> list[ArtifactInfo]:
    """Return the files of a study and of its trials, or of one trial: up to `limit` + 1, so that the caller sees if
    there are more.
    """
    query = select(ArtifactRow).order_by(ArtifactRow.artifact_id).limit(limit + 1)
    if study_id is not None:
        query = query.where(ArtifactRow.study_id == study_id)
    if trial_id is not None:
        query = query.where(ArtifactRow.trial_id == trial_id)
    if after is not None:
        query = query.where(ArtifactRow.artifact_id > after)
    with reading(engine) as session:
        return [_artifact(row) for row in session.scalars(query)]


def find_artifact(engine: Engine, trial_id: str, kind: str) -> ArtifactInfo | None:
    """Return the newest file of one kind that a trial has."""
    query = (
        select(ArtifactRow)
        .where(ArtifactRow.trial_id == trial_id, ArtifactRow.kind == kind)
        .order_by(ArtifactRow.artifact_id.desc())
        .limit(1)
    )
    with reading(engine) as session:
        row = session.scalar(query)
        return None if row is None else _artifact(row)


def artifact_by_id(engine: Engine, artifact_id: int) -> ArtifactInfo | None:
    with reading(engine) as session:
        row = session.get(ArtifactRow, artifact_id)
        return None if row is None else _artifact(row)


def _artifact(row: ArtifactRow) -> ArtifactInfo:
    return message(ArtifactInfo, row)
