"""Conversion of records to rows and back, without queries."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, TypeVar

from msgspec.structs import replace

from steptune.service.alike import record_like
from steptune.service.fencing import Lease
from steptune.service.models import (
    ArtifactRow,
    Base,
    BreakdownRow,
    CollectiveStatsRow,
    DecisionRow,
    EventRow,
    FindingRow,
    GapStatsRow,
    HardwareProfileRow,
    KernelStatsRow,
    RecommendationRow,
    StrategyOutcomeRow,
    StudyRow,
    TopologyRow,
    TrialAttemptRow,
    TrialRow,
    WorkloadRow,
)
from steptune.tuner.objectives import parse_objective
from steptune.tuner.records import (
    Artifact,
    Attempt,
    Breakdown,
    Decision,
    Event,
    HardwareProfile,
    Recommendation,
    Record,
    Study,
    Topology,
    Trial,
    TrialProfile,
    TrialResult,
    TrialState,
    WorkloadFacts,
)
from steptune.tuner.speeds import contribution_of, proven_gain
from steptune.tuner.store_rules import decode, encode, number, parse_time

AnyRow = TypeVar("AnyRow", bound=Base)
ResultRow = BreakdownRow | KernelStatsRow | GapStatsRow | CollectiveStatsRow | FindingRow


def workload_row(facts: WorkloadFacts) -> WorkloadRow:
    """Return the row of a workload. The reference alone does not identify a workload, because its code may have been
    edited; the reference and the signature together do.
    """
    identity = f"{facts.reference}\0{facts.signature}".encode("utf-8", "surrogateescape")
    return _row(WorkloadRow, facts, workload_id=hashlib.sha256(identity).hexdigest()[:16])


def hardware_row(profile: HardwareProfile) -> HardwareProfileRow:
    return _row(HardwareProfileRow, profile)


def topology_row(topology: Topology) -> TopologyRow:
    return TopologyRow(
        hardware_fingerprint=topology.hardware_fingerprint,
        host_of_rank=",".join(map(str, topology.host_of_rank)),
        num_ranks=topology.num_ranks,
        num_hosts=topology.num_hosts,
        measured_at=parse_time(topology.measured_at),
        record=encode(topology),
    )


def study_row(study: Study) -> StudyRow:
    return StudyRow(
        study_id=study.study_id,
        workload=study.workload,
        workload_id=None if study.facts is None else workload_row(study.facts).workload_id,
        hardware_fingerprint=None if study.environment is None else study.environment.hardware.fingerprint,
        state=study.state.value,
        created_at=parse_time(study.created_at),
        record=encode(study),
    )


def trial_row(trial: Trial) -> TrialRow:
    return TrialRow(
        trial_id=trial.trial_id,
        study_id=trial.study_id,
        sequence=trial.sequence,
        candidate_key=trial.candidate.key,
        purpose=trial.purpose.value,
        trial_group=trial.group,
        replicate=trial.replicate,
        state=trial.state.value,
        record=encode(trial),
    )


def attempt_row(trial: Trial, lease: Lease | None = None) -> TrialAttemptRow:
    return TrialAttemptRow(
        trial_id=trial.trial_id,
        number=trial.attempts,
        outcome=trial.state.value,
        fence=0 if lease is None else lease.fence,
        worker_id=None if lease is None else lease.worker_id,
        started_at=parse_time(trial.started_at),
    )


def repeated_rows(result: TrialResult, first: TrialAttemptRow) -> list[TrialAttemptRow]:
    """Return the rows of the second and all later attempts at a repeated trial. The last attempt, which `result`
    describes, has no end yet.

    Args:
        first: The row that was written as the trial began. It ends with the first attempt.
    """
    ends = [_end_of(attempt) for attempt in result.repeated]
    first.outcome, first.ended_at = TrialState.FAILED.value, ends[0]
    last = len(ends) - 1
    return [
        TrialAttemptRow(
            trial_id=first.trial_id,
            number=first.number + 1 + number,
            outcome=(TrialState.RUNNING if number == last else TrialState.FAILED).value,
            fence=first.fence,
            worker_id=first.worker_id,
            started_at=began,
            ended_at=None if number == last else ends[number + 1],
        )
        for number, began in enumerate(ends)
    ]


def _end_of(attempt: Attempt) -> datetime:
    return parse_time(attempt.began_at) + timedelta(microseconds=attempt.duration_ns / 1e3)


def result_rows(result: TrialResult) -> Iterator[ResultRow]:
    """Yield the rows for parts of a result that are searched or aggregated on their own."""
    profile = result.profile or TrialProfile()
    for breakdown in result.breakdowns:
        yield from _breakdown_rows(result.trial_id, breakdown)
    yield from _numbered(KernelStatsRow, result, profile.kernels)
    yield from _numbered(GapStatsRow, result, profile.gap_sites)
    yield from _numbered(CollectiveStatsRow, result, profile.collectives)
    yield from _numbered(FindingRow, result, result.findings)


def decision_row(study_id: str, decision: Decision) -> DecisionRow:
    key = None if decision.candidate is None else decision.candidate.key
    return _row(DecisionRow, decision, study_id=study_id, candidate_key=key)


def recommendation_row(recommendation: Recommendation) -> RecommendationRow:
    return RecommendationRow(
        study_id=recommendation.study_id,
        created_at=parse_time(recommendation.created_at),
        workload_signature=recommendation.workload_signature,
        device_kind=recommendation.hardware.device_kind,
        verdict=recommendation.verdict.value,
        candidate_key=recommendation.candidate.key,
        gain=number(proven_gain(recommendation)) if _is_speed(recommendation) else None,
        bottleneck_before=recommendation.bottleneck_before,
        bottleneck_after=recommendation.bottleneck_after,
        tuning_s=number(recommendation.cost.tuning_s),
        record=encode(recommendation),
    )


def _is_speed(recommendation: Recommendation) -> bool:
    """Say whether the recommendation's gains are gains in speed. Gains in energy are not stored in the same columns."""
    return parse_objective(recommendation.objective).is_rate


def strategy_rows(recommendation: Recommendation, decisions: Iterable[Decision]) -> list[StrategyOutcomeRow]:
    """Return the outcome of each strategy that was tried or is part of the answer; unconfirmed gains are left out."""
    tried: Counter[str] = Counter()
    for decision in decisions:
        if decision.verdict != "not_tried" and decision.stage != "confirm":
            tried.update({move.strategy for move in decision.moves})
    parts = recommendation.parts if _is_speed(recommendation) else ()
    known = {part.strategy: contribution_of(recommendation, part) for part in parts}
    own = {name: speed for name, speed in known.items() if speed is not None and not speed.together}
    gains = {name: number(speed.ratio) for name, speed in own.items()}
    return [
        StrategyOutcomeRow(
            study_id=recommendation.study_id,
            strategy=name,
            num_tried=tried[name],
            gain=gains.get(name),
        )
        for name in sorted({*tried, *gains})
    ]


def event_row(event: Event, at: datetime, owner_id: str | None) -> EventRow:
    """Return the row of an event; the database assigns its number."""
    return EventRow(study_id=event.study_id, owner_id=owner_id, kind=event.kind, at=at, record=encode(event))


def trial_of(record: str, state: str, result: str | None) -> Trial:
    """Decode the record of a trial's beginning, and add the trial's state, result and number of attempts."""
    found = None if result is None else decode(result, TrialResult)
    trial = decode(record, Trial)
    attempts = trial.attempts + (0 if found is None else len(found.repeated))
    return replace(trial, state=TrialState(state), attempts=attempts, result=found)


def event_of(row: EventRow) -> Event:
    return replace(decode(row.record, Event), sequence=row.event_id)


def artifact_of(row: ArtifactRow) -> Artifact:
    return record_like(Artifact, row, created_at=row.created_at.isoformat())


def _numbered(kind: type[AnyRow], result: TrialResult, records: Iterable[Record]) -> Iterator[AnyRow]:
    for place, record in enumerate(records):
        yield _row(kind, record, trial_id=result.trial_id, number=place)


def _row(kind: type[AnyRow], record: Record, **given: Any) -> AnyRow:
    """Build a row from the equally named fields of a record. A column for the complete record is filled too, if the row
    has one.
    """
    columns = kind.__mapper__.columns.keys()
    if "record" in columns:
        given["record"] = encode(record)
    values = given | {name: getattr(record, name) for name in columns if name not in given}
    return kind(**{name: number(value) if isinstance(value, float) else value for name, value in values.items()})


def _breakdown_rows(trial_id: str, breakdown: Breakdown) -> Iterator[BreakdownRow]:
    for category in {**breakdown.categories, **breakdown.rescaled}:
        yield BreakdownRow(
            trial_id=trial_id,
            rank=breakdown.rank,
            device=breakdown.device,
            category=category,
            num_steps=breakdown.num_steps,
            ns=breakdown.categories.get(category, 0),
            rescaled_ns=breakdown.rescaled.get(category, 0) if breakdown.rescaled else None,
        )
