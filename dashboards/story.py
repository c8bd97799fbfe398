"""What was tried, what was not, and why."""

from __future__ import annotations

import math
from typing import NamedTuple

from steptune.dashboards import units
from steptune.dashboards.sources import TrialSource
from steptune.tuner.records import Decision, choice_label

NORMAL_QUANTILE = 1.96


class TriedRow(NamedTuple):
    """A decision about something that was run; what is not known is NaN."""

    number: int
    stage: str
    changed: str
    verdict: str
    limit: float
    """The ratio of speeds that the predicted bound allowed."""
    gain: float
    """The measured ratio over the best configuration of that time."""
    low: float
    high: float
    """The 95 % interval of the gain."""
    trial_ids: tuple[str, ...]
    reason: str


class NotTriedRow(NamedTuple):
    """A strategy, the choices of it that were left out, and why."""

    strategy: str
    choices: tuple[str, ...]
    reason: str


def get_tried_info(source: TrialSource, study_id: str) -> list[TriedRow]:
    """One row for each decision about something that was run, in order."""
    return [
        TriedRow(
            decision.sequence,
            decision.stage,
            _changed(decision),
            decision.verdict,
            math.nan if decision.predicted_bound is None else units.gain_limit(decision.predicted_bound),
            *_measured(decision),
            decision.trial_ids,
            decision.reason,
        )
        for decision in source.decisions(study_id)
        if decision.verdict != "not_tried"
    ]


def get_not_tried_info(source: TrialSource, study_id: str) -> list[NotTriedRow]:
    """One row for each strategy and reason, with the choices that were left out for it."""
    recommendation = source.recommendation(study_id)
    decisions = list(source.decisions(study_id))
    if recommendation is not None:
        decisions += recommendation.certificate.not_tried
    choices: dict[tuple[str, str], dict[str, None]] = {}
    for decision in decisions:
        if decision.verdict == "not_tried":
            strategy = " with ".join(move.strategy for move in decision.moves) or "search"
            label = "; ".join(choice_label(move.choice) for move in decision.moves)
            choices.setdefault((strategy, decision.reason), {})[label] = None
    return sorted(NotTriedRow(strategy, tuple(labels), reason) for (strategy, reason), labels in choices.items())


def _changed(decision: Decision) -> str:
    if decision.moves:
        return units.moves_label(decision.moves)
    if decision.candidate is None:
        return ""
    return "nothing: today's settings" if decision.candidate.is_baseline else decision.candidate.label


def _measured(decision: Decision) -> tuple[float, float, float]:
    """The ratio and its interval, which is taken on the logarithm."""
    if decision.measured_gain is None:
        return math.nan, math.nan, math.nan
    ratio = 1 + decision.measured_gain
    if decision.measured_se is None or not math.isfinite(decision.measured_se):
        return ratio, math.nan, math.nan
    factor = math.exp(NORMAL_QUANTILE * decision.measured_se)
    return ratio, ratio / factor, ratio * factor
