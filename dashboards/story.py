"""What was tried, what was not, and why."""

from __future__ import annotations

import math

import pandas as pd

from steptune.dashboards import units
from steptune.dashboards.sources import TrialSource
from steptune.tuner.records import Decision, choice_label

TRIED_COLUMNS = ("number", "stage", "changed", "verdict", "limit", "gain", "low", "high", "trial_ids", "reason")
NOT_TRIED_COLUMNS = ("strategy", "choices", "reason")
NORMAL_QUANTILE = 1.96


def get_tried_info(source: TrialSource, study_id: str) -> pd.DataFrame:
    """One row for each decision about something that was run, in order.

    `limit` is the ratio of speeds that the predicted bound allowed, `gain` the measured ratio over the
    best configuration of that time, `low` and `high` its 95 % interval; NaN where not known.
    """
    rows = [
        (
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
    return pd.DataFrame(rows, columns=list(TRIED_COLUMNS))


def get_not_tried_info(source: TrialSource, study_id: str) -> pd.DataFrame:
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
    rows = [(strategy, tuple(labels), reason) for (strategy, reason), labels in choices.items()]
    return pd.DataFrame(sorted(rows), columns=list(NOT_TRIED_COLUMNS))


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
