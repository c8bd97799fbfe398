"""Which traces are kept: those of the baseline, of incumbents and of finalists, within quotas.

Traces of other trials are kept until their study ends. Where a study, a user or all together take more than they may,
the oldest traces of ended studies go first; those of a recommendation never go, nor does anything but traces. What
goes here are rows; `service.artifacts.collection` removes the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sqlalchemy import ColumnElement, Engine, Select, and_, delete, false, func, or_, select, union
from sqlalchemy.orm import Session

from service.connections import reading, writing
from service.models import ArtifactRow, DecisionRow, RecommendationRow, StudyRow, TrialRow, UserRow, WorkloadSourceRow
from service.settings import Settings
from tuner.records import BASELINE, StudyState

TRACE = "trace"
KEPT_VERDICTS = ("measured", "accepted", "confirmed", "not_confirmed")
"""Of decisions: on the baseline, on what became the incumbent, and on finalists."""
ENDED_STATES = tuple(state.value for state in (StudyState.COMPLETED, StudyState.CANCELLED, StudyState.FAILED))
_BATCH = 500
"""Rows that one transaction removes: others wait for it on SQLite."""


def release_traces(engine: Engine) -> int:
    """Forgets the traces of ended studies that are neither baseline's, incumbents' nor finalists'; returns how many."""
    kept = or_(
        TrialRow.candidate_key == BASELINE.key,
        TrialRow.candidate_key == RecommendationRow.candidate_key,
        select(DecisionRow.study_id)
        .where(
            DecisionRow.study_id == TrialRow.study_id,
            DecisionRow.candidate_key == TrialRow.candidate_key,
            DecisionRow.verdict.in_(KEPT_VERDICTS),
        )
        .exists(),
    )
    others = _traces_of_ended_studies().where(func.coalesce(kept, false()).is_(false())).limit(_BATCH)
    total = 0
    while removed := _forget(engine, others):
        total += removed
    return total


def apply_quotas(engine: Engine, settings: Settings) -> int:
    """Forgets the oldest traces of whoever takes more than they may; returns how many."""
    return sum(_shed(engine, scope, limit) for scope, limit in _exceeded(engine, settings))


def user_artifact_bytes(session: Session, user_id: str) -> int:
    """What the studies and uploads of a user take; content that several have counts once."""
    return _usage(session, StudyRow.owner_id == user_id, WorkloadSourceRow.owner_id == user_id)


def _exceeded(engine: Engine, settings: Settings) -> Iterator[tuple[ColumnElement[bool], int]]:
    """Scopes that take more than they may, with how many bytes less they should take."""
    with reading(engine) as session:
        if settings.max_study_artifact_bytes is not None:
            total = func.sum(ArtifactRow.size_bytes)
            large = select(ArtifactRow.study_id, total).group_by(ArtifactRow.study_id)
            for study_id, size in session.execute(large.having(total > settings.max_study_artifact_bytes)).all():
                yield StudyRow.study_id == study_id, int(size) - settings.max_study_artifact_bytes
        for user_id, own_limit in session.execute(select(UserRow.user_id, UserRow.max_artifact_bytes)).all():
            limit = settings.max_user_artifact_bytes if own_limit is None else own_limit
            if limit is not None and (excess := user_artifact_bytes(session, user_id) - limit) > 0:
                yield StudyRow.owner_id == user_id, excess
        if settings.max_artifact_bytes is not None:
            excess = _usage(session, None, None) - settings.max_artifact_bytes
            if excess > 0:
                yield StudyRow.study_id.is_not(None), excess


def _usage(session: Session, studies: ColumnElement[bool] | None, sources: ColumnElement[bool] | None) -> int:
    of_studies = select(ArtifactRow.digest, ArtifactRow.size_bytes)
    if studies is not None:
        of_studies = of_studies.join(StudyRow, StudyRow.study_id == ArtifactRow.study_id).where(studies)
    of_sources = select(WorkloadSourceRow.digest, WorkloadSourceRow.size_bytes)
    of_sources = of_sources.where(WorkloadSourceRow.digest.is_not(None))
    if sources is not None:
        of_sources = of_sources.where(sources)
    files = union(of_studies, of_sources).subquery()
    return int(session.scalar(select(func.coalesce(func.sum(files.c.size_bytes), 0))) or 0)


def _traces_of_ended_studies() -> Select[int, str, int]:
    """Their ids, digests and sizes, joined with trials and recommendations, the oldest first."""
    return (
        select(ArtifactRow.artifact_id, ArtifactRow.digest, ArtifactRow.size_bytes)
        .join(StudyRow, StudyRow.study_id == ArtifactRow.study_id)
        .join(TrialRow, TrialRow.trial_id == ArtifactRow.trial_id)
        .outerjoin(RecommendationRow, RecommendationRow.study_id == StudyRow.study_id)
        .where(ArtifactRow.kind == TRACE, StudyRow.state.in_(ENDED_STATES))
        .order_by(ArtifactRow.artifact_id)
    )


def _shed(engine: Engine, scope: ColumnElement[bool], excess_bytes: int) -> int:
    """Forgets traces within a scope, until that frees enough or none is left that may go."""
    recommended = and_(
        RecommendationRow.candidate_key.is_not(None), TrialRow.candidate_key == RecommendationRow.candidate_key
    )
    candidates = _traces_of_ended_studies().where(scope, func.coalesce(recommended, false()).is_(false())).limit(_BATCH)
    total = 0
    while excess_bytes > 0:
        with writing(engine) as session:
            found = session.execute(candidates).all()
            chosen = []
            users = _num_references(session, {digest for _, digest, _ in found})
            for artifact_id, digest, size in found:
                if excess_bytes <= 0:
                    break
                chosen.append(artifact_id)
                users[digest] -= 1
                excess_bytes -= size if users[digest] == 0 else 0
            session.execute(delete(ArtifactRow).where(ArtifactRow.artifact_id.in_(chosen)))
        if not chosen:
            break
        total += len(chosen)
    return total


def _num_references(session: Session, digests: set[str]) -> Counter[str]:
    """How many rows refer to each: a file is free when none does."""
    found: Counter[str] = Counter()
    for column in (ArtifactRow.digest, WorkloadSourceRow.digest):
        counts = select(column, func.count()).where(column.in_(digests)).group_by(column)
        found.update({digest: count for digest, count in session.execute(counts).all() if digest is not None})
    return found


def _forget(engine: Engine, traces: Select[int, str, int]) -> int:
    with writing(engine) as session:
        chosen = [artifact_id for artifact_id, _, _ in session.execute(traces).all()]
        session.execute(delete(ArtifactRow).where(ArtifactRow.artifact_id.in_(chosen)))
        return len(chosen)
