"""Progress of a running study: the time left, the best speed so far with its interval, and the running trial with its
reason.

Until there is an answer, speeds of configurations are those of `dashboards.effects`, as in the page's tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from steptune.dashboards.effects import Effects
from steptune.dashboards.sources import TrialSource
from steptune.dashboards.starts import leading_candidate
from steptune.tuner.records import Candidate, Choice, Finding, Purpose, StudyState, Trial, TrialState, choice_label

WHY: dict[Purpose, str] = {
    Purpose.BASELINE: "the reference for all speeds",
    Purpose.REPLICATE: "repeated, for a narrower interval",
    Purpose.SENTINEL: "repeats today's settings, to detect drift of the machine's speed",
    Purpose.COMPANION: "takes turns with a candidate, for comparison",
    Purpose.AUDIT: "excluded by its predicted bound, but run to check such bounds",
    Purpose.CONFIRM: "a finalist, compared with today's settings in new runs",
    Purpose.CONTRIBUTION: "measures the contribution of one change",
    Purpose.MOVED: "repeated, because the trials moved to other cores or devices",
}
"""Reasons for trials that do not test a new choice."""


class RunningRow(NamedTuple):
    """A trial that is running, with its reason."""

    number: int
    trial_id: str
    label: str
    why: str


class UnderWay(NamedTuple):
    """Progress of a study that has not ended."""

    left_s: float
    budget_s: float
    best_label: str
    best: float
    """Estimated speed of the last accepted settings, as in the search; NaN before any are accepted."""
    low: float
    high: float
    running: tuple[RunningRow, ...]


def get_under_way(
    source: TrialSource,
    study_id: str,
    spent_s: float,
    effects: Effects,
    findings: Sequence[Finding],
) -> UnderWay | None:
    """Return the progress of a study; None where the study has ended or has no trial yet.

    Args:
        spent_s: Time of the trials that have ended, in seconds.
        findings: Findings of the latest profile of the leading settings.
    """
    study = source.get_study(study_id)
    if study.state is not StudyState.RUNNING or not source.trials(study_id):
        return None
    leading = leading_candidate(source, study_id)
    best = effects.speed(leading[1]) if leading else None
    before = leading[1].choices if leading else {}
    return UnderWay(
        left_s=max(0.0, study.settings.budget_s - spent_s),
        budget_s=study.settings.budget_s,
        best_label=leading[1].label if leading else "",
        best=best.value if best else math.nan,
        low=best.low if best else math.nan,
        high=best.high if best else math.nan,
        running=tuple(
            RunningRow(t.sequence, t.trial_id, _label(t.candidate, before), _why(t, before, findings))
            for t in source.trials(study_id)
            if t.state is TrialState.RUNNING
        ),
    )


def _why(trial: Trial, before: dict[str, Choice], findings: Sequence[Finding]) -> str:
    """Return the reason for a trial: the finding that its change addresses, or else the trial's purpose."""
    if trial.purpose in WHY:
        return WHY[trial.purpose]
    changed = _changed(trial.candidate, before)
    for finding in findings:
        if changed & set(finding.strategies):
            return f"addresses the finding: {finding.message}"
    return "measures its speed"


def _changed(candidate: Candidate, before: dict[str, Choice]) -> set[str]:
    return {name for name in {*candidate.choices, *before} if candidate.choices.get(name) != before.get(name)}


def _label(candidate: Candidate, before: dict[str, Choice]) -> str:
    """Describe how a candidate differs from the leading settings."""
    names = sorted(_changed(candidate, before))
    parts = [f"{n}: {choice_label(candidate.choices[n]) if n in candidate.choices else 'as today'}" for n in names]
    return "; ".join(parts) or ("the best so far" if before else "today's settings")
