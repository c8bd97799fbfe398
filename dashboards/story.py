"""Tables of the strategies that were tried, and of those that were not, with the reasons."""

from __future__ import annotations

import math
from typing import NamedTuple

from steptune.dashboards import units
from steptune.dashboards.effects import UNKNOWN_RATIO, Effects, Ratio
from steptune.dashboards.sources import TrialSource
from steptune.tuner.records import Decision, choice_label

NOT_USABLE = ("failed", "guard_rejected", "no_effect")
"""Verdicts that make the speed of a configuration meaningless."""


class TriedRow(NamedTuple):
    """A decision based on a run; unknown values are NaN."""

    number: int
    stage: str
    changed: str
    verdict: str
    limit: float
    """Upper limit of the gain, predicted before the run, as a ratio of speeds."""
    gain: float
    """Speed of the decision's configuration relative to today's settings, as other tables state it."""
    low: float
    high: float
    """Upper end of the 95 % interval of the gain."""
    method: str
    """Method by which the gain was measured."""
    trial_ids: tuple[str, ...]
    reason: str


class NotTriedRow(NamedTuple):
    """A strategy, its choices that were left out, and the reason."""

    strategy: str
    choices: tuple[str, ...]
    reason: str


def get_tried_info(source: TrialSource, study_id: str, effects: Effects) -> list[TriedRow]:
    """Return one row for each decision that is based on a run, in order."""
    return [
        TriedRow(
            decision.sequence,
            decision.stage,
            _changed(decision),
            decision.verdict,
            math.nan if decision.predicted_bound is None else units.gain_limit(decision.predicted_bound),
            *_speed(decision, effects),
            decision.trial_ids,
            decision.reason,
        )
        for decision in source.decisions(study_id)
        if decision.verdict != "not_tried"
    ]


def get_not_tried_info(source: TrialSource, study_id: str) -> list[NotTriedRow]:
    """Return one row for each strategy and reason, with the choices left out for that reason."""
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


def _speed(decision: Decision, effects: Effects) -> Ratio:
    """Return the speed of a decision's configuration; NaN for today's settings, and where the verdict makes the speed
    meaningless.
    """
    candidate = decision.candidate
    if candidate is None or candidate == effects.reference or decision.verdict in NOT_USABLE:
        return UNKNOWN_RATIO
    return effects.speed(candidate)
