"""What each strategy brought the search, and what it cost to find out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pandas as pd

from steptune.dashboards import units
from steptune.dashboards.sources import TrialSource

COLUMNS = ("strategy", "num_tried", "num_accepted", "num_rejected", "limit", "best", "own_gain", "spent_s")


@dataclass
class _Sum:
    """Of one strategy."""

    num_tried: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    limits: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    spent_s: float = 0.0


def get_contributions_info(source: TrialSource, study_id: str) -> pd.DataFrame:
    """One row a strategy of which something was tried; what gained the most in the recommendation comes first.

    `limit` is the ratio of speeds that the widest bound promised, `best` the best that was measured over the
    incumbent of its time, `own_gain` what it is worth in the recommendation, `spent_s` the time of the trials that
    tried it (a change of several strategies is shared among them).
    """
    spent = {t.trial_id: t.result.duration_ns / 1e9 for t in source.trials(study_id) if t.result is not None}
    sums: dict[str, _Sum] = {}
    for decision in source.decisions(study_id):
        if decision.verdict == "not_tried" or decision.stage == "confirm":
            continue
        for move in decision.moves:
            found = sums.setdefault(move.strategy, _Sum())
            found.num_tried += 1
            found.num_accepted += decision.verdict == "accepted"
            found.num_rejected += decision.verdict in ("guard_rejected", "failed")
            found.spent_s += sum(spent.get(i, 0.0) for i in decision.trial_ids) / len(decision.moves)
            if decision.predicted_bound is not None:
                found.limits.append(units.gain_limit(decision.predicted_bound))
            if decision.measured_gain is not None:
                found.measured.append(1 + decision.measured_gain)
    recommendation = source.recommendation(study_id)
    own = {part.strategy: part.gain for part in recommendation.parts} if recommendation else {}
    rows = [
        (
            name,
            s.num_tried,
            s.num_accepted,
            s.num_rejected,
            max(s.limits, default=math.nan),
            max(s.measured, default=math.nan),
            own.get(name, math.nan),
            s.spent_s,
        )
        for name, s in sums.items()
    ]
    rows.sort(key=lambda row: (-_or_zero(row[6]), -row[2], -_or_zero(row[5]), row[0]))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
