"""Contribution of each strategy to the recommendation, and the search time spent on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from steptune.dashboards import units
from steptune.dashboards.gains import get_gains_info
from steptune.dashboards.sources import TrialSource


class ContributionRow(NamedTuple):
    """Trials, gain and search time of one strategy with at least one trial; unknown values are NaN."""

    strategy: str
    num_tried: int
    num_accepted: int
    num_rejected: int
    limit: float
    """Upper limit of the strategy's gain, as a ratio of speeds: the largest limit predicted for any of its choices."""
    own_gain: float
    """Contribution to the recommendation, where its interval excludes 1."""
    spent_s: float
    """Time of the strategy's trials, in seconds. If a trial changed several strategies, its time is divided among them.
    """


@dataclass
class _Sum:
    """Running sums for one strategy."""

    num_tried: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    limits: list[float] = field(default_factory=list)
    spent_s: float = 0.0


def get_contributions_info(source: TrialSource, study_id: str) -> list[ContributionRow]:
    """Return one row per strategy with a trial, the largest contribution to the recommendation first."""
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
    own = {row.strategy: row.gain for row in get_gains_info(source, study_id)}
    rows = [
        ContributionRow(
            name,
            s.num_tried,
            s.num_accepted,
            s.num_rejected,
            max(s.limits, default=math.nan),
            own.get(name, math.nan),
            s.spent_s,
        )
        for name, s in sums.items()
    ]
    return sorted(rows, key=lambda row: (-_or_zero(row.own_gain), -row.num_accepted, row.strategy))


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
