"""Trials of a study, grouped by the configuration that they measured."""

from __future__ import annotations

from collections.abc import Sequence

from steptune.dashboards.sources import TrialSource
from steptune.tuner.records import Candidate, Purpose, Trial, TrialResult

TODAY, RECOMMENDED, BEST_SO_FAR = "today", "recommended", "best so far"
NEAREST = "nearest that fits"
"""Name of the configuration that serves as the reference if today's settings ran out of memory."""


def results(trials: Sequence[Trial]) -> list[TrialResult]:
    return [trial.result for trial in trials if trial.result is not None]


def reference_results(trials: Sequence[Trial]) -> list[TrialResult]:
    """Return the measured runs of the reference."""
    return [r for r in results(trials) if r.purpose is Purpose.BASELINE and r.ok]


def reference_name(source: TrialSource, study_id: str) -> str:
    """Name the reference: the configuration to which speeds are relative."""
    starts = reference_results(source.trials(study_id))
    return TODAY if not starts or starts[0].candidate.is_baseline else NEAREST


def leading_candidate(source: TrialSource, study_id: str) -> tuple[str, Candidate] | None:
    """Return the configuration to compare with today's settings: the recommended one, else the last accepted one."""
    recommendation = source.recommendation(study_id)
    if recommendation is not None:
        return (RECOMMENDED, recommendation.candidate) if not recommendation.candidate.is_baseline else None
    accepted = [d.candidate for d in source.decisions(study_id) if d.verdict == "accepted" and d.candidate]
    return (BEST_SO_FAR, accepted[-1]) if accepted else None
