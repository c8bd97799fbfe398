"""Retention of traces: those of the baseline, of incumbents and of finalists, within quotas.

Traces of other trials are kept until their study ends. Where a study, a user or all together take more than they may,
the oldest traces of ended studies go first; those of a recommendation never go, nor does anything but traces. What
goes here are rows; `steptune.service.artifacts.collection` removes the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Engine, Select, and_, delete, false, func, or_, select, true, union
from sqlalchemy.orm import Session

from steptune.service.connections import reading, writing
from steptune.service.models import (
    ArtifactRow,
    DecisionRow,
    RecommendationRow,
    StudyRow,
    TrialRow,
    UserRow,
    WorkloadSourceRow,
)
from steptune.service.settings import Settings
from steptune.service.store import count_change
from steptune.tuner.records import BASELINE, StudyState

TRACE = "trace"
"""Kind of rank 0's trace; the traces of further ranks have the kinds `trace.1`, `trace.2` and so on."""
KEPT_VERDICTS = ("measured", "accepted", "confirmed", "not_confirmed")
"""Verdicts on the baseline, incumbents and finalists. Traces of the configurations with such a verdict are kept."""
ENDED_STATES = tuple(state.value for state in (StudyState.COMPLETED, StudyState.CANCELLED, StudyState.FAILED))
_BATCH = 500
"""Maximum number of rows that one transaction removes; on SQLite, other writers wait until the transaction ends."""


def trace_kind(rank: int) -> str:
    return f"{TRACE}.{rank}" if rank else TRACE


def release_traces(engine: Engine) -> int:
    """Forget the traces of ended studies, except those of the baseline, incumbents and finalists; return the number
    forgotten.
    """
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
    """Forget the oldest traces where a study, a user or the total exceeds its quota; return the number of traces
    forgotten.
    """
    return sum(_shed(engine, scope) for scope in _scopes(engine, settings))


def user_artifact_bytes(session: Session, user_id: str) -> int:
    """Return the bytes of a user's studies and uploads; content that several of them share counts once."""
    return _usage(session, _scope_of_user(user_id))


@dataclass(frozen=True, kw_only=True)
class _Scope:
    """Files of some studies and uploads, to which one quota applies. Content that they share counts once."""

    studies: ColumnElement[bool]
    sources: ColumnElement[bool]
    limit_bytes: int = 0


def _scope_of_user(user_id: str, limit_bytes: int = 0) -> _Scope:
    studies, sources = StudyRow.owner_id == user_id, WorkloadSourceRow.owner_id == user_id
    return _Scope(studies=studies, sources=sources, limit_bytes=limit_bytes)


def _scopes(engine: Engine, settings: Settings) -> list[_Scope]:
    """Return the scopes above their quotas: studies, then users, then everything."""
    scopes = []
    with reading(engine) as session:
        if (limit := settings.max_study_artifact_bytes) is not None:
            files = select(ArtifactRow.study_id, ArtifactRow.digest, ArtifactRow.size_bytes).distinct().subquery()
            large = select(files.c.study_id).group_by(files.c.study_id).having(func.sum(files.c.size_bytes) > limit)
            for study_id in session.scalars(large):
                scopes.append(_Scope(studies=StudyRow.study_id == study_id, sources=false(), limit_bytes=limit))
        for user_id, own_limit in session.execute(select(UserRow.user_id, UserRow.max_artifact_bytes)):
            limit = settings.max_user_artifact_bytes if own_limit is None else own_limit
            if limit is not None:
                scopes.append(_scope_of_user(user_id, limit))
    if settings.max_artifact_bytes is not None:
        scopes.append(_Scope(studies=true(), sources=true(), limit_bytes=settings.max_artifact_bytes))
    return scopes


def _usage(session: Session, scope: _Scope) -> int:
    of_studies = select(ArtifactRow.digest, ArtifactRow.size_bytes)
    of_studies = of_studies.join(StudyRow, StudyRow.study_id == ArtifactRow.study_id).where(scope.studies)
    of_sources = select(WorkloadSourceRow.digest, WorkloadSourceRow.size_bytes)
    of_sources = of_sources.where(WorkloadSourceRow.digest.is_not(None), scope.sources)
    files = union(of_studies, of_sources).subquery()
    return int(session.scalar(select(func.coalesce(func.sum(files.c.size_bytes), 0))) or 0)


def _traces_of_ended_studies() -> Select[int, str, int]:
    """Select ids, digests and sizes of the traces of ended studies, joined with trials and recommendations, the oldest
    first.
    """
    return (
        select(ArtifactRow.artifact_id, ArtifactRow.digest, ArtifactRow.size_bytes)
        .join(StudyRow, StudyRow.study_id == ArtifactRow.study_id)
        .join(TrialRow, TrialRow.trial_id == ArtifactRow.trial_id)
        .outerjoin(RecommendationRow, RecommendationRow.study_id == StudyRow.study_id)
        .where(or_(ArtifactRow.kind == TRACE, ArtifactRow.kind.startswith(f"{TRACE}.")))
        .where(StudyRow.state.in_(ENDED_STATES))
        .order_by(ArtifactRow.artifact_id)
    )


def _shed(engine: Engine, scope: _Scope) -> int:
    """Forget traces within a scope until it meets its quota or has no removable traces left; return the number
    forgotten.
    """
    total = 0
    while (excess_bytes := _excess(engine, scope)) > 0 and (removed := _shed_some(engine, scope, excess_bytes)):
        total += removed
    return total


def _excess(engine: Engine, scope: _Scope) -> int:
    """Return the bytes above a scope's quota, read in a new transaction, which sees all earlier removals."""
    with reading(engine) as session:
        return _usage(session, scope) - scope.limit_bytes


def _shed_some(engine: Engine, scope: _Scope, excess_bytes: int) -> int:
    recommended = and_(
        RecommendationRow.candidate_key.is_not(None), TrialRow.candidate_key == RecommendationRow.candidate_key
    )
    candidates = _traces_of_ended_studies().where(scope.studies, func.coalesce(recommended, false()).is_(false()))
    chosen = []
    with writing(engine) as session:
        found = session.execute(candidates.limit(_BATCH)).all()
        users = _num_references(session, scope, {digest for _, digest, _ in found})
        for artifact_id, digest, size in found:
            if excess_bytes <= 0:
                break
            chosen.append(artifact_id)
            users[digest] -= 1
            excess_bytes -= size if users[digest] == 0 else 0
        _delete(session, chosen)
    return len(chosen)


def _num_references(session: Session, scope: _Scope, digests: set[str]) -> Counter[str]:
    """Count the rows within a scope that refer to each digest; content without a row takes no space in the scope."""
    artifacts = select(ArtifactRow.digest, func.count()).join(StudyRow, StudyRow.study_id == ArtifactRow.study_id)
    artifacts = artifacts.where(ArtifactRow.digest.in_(digests), scope.studies).group_by(ArtifactRow.digest)
    uploads = select(WorkloadSourceRow.digest, func.count()).where(WorkloadSourceRow.digest.in_(digests), scope.sources)
    found: Counter[str] = Counter()
    for counts in (artifacts, uploads.group_by(WorkloadSourceRow.digest)):
        found.update({digest: count for digest, count in session.execute(counts).all() if digest is not None})
    return found


def _forget(engine: Engine, traces: Select[int, str, int]) -> int:
    with writing(engine) as session:
        chosen = [artifact_id for artifact_id, _, _ in session.execute(traces).all()]
        _delete(session, chosen)
        return len(chosen)


def _delete(session: Session, chosen: Sequence[int]) -> None:
    """Delete rows of artifacts, and mark cached pages of their studies as outdated."""
    of_chosen = ArtifactRow.artifact_id.in_(chosen)
    count_change(session, StudyRow.study_id.in_(select(ArtifactRow.study_id).where(of_chosen)))
    session.execute(delete(ArtifactRow).where(of_chosen))
