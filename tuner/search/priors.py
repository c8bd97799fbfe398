"""Prior knowledge for a new study from earlier studies in the store."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from steptune.tuner.protocols import StudyStore
from steptune.tuner.records import Decision, Recommendation
from steptune.tuner.search.knowledge import Priors
from steptune.tuner.search.similar import FARTHEST, distance
from steptune.tuner.search.space import Space

MAX_WINNERS = 2
WEIGHT = 4
"""Weight of the usual share, as an equivalent number of past trials. The usual share is the part of its maximum saving
that a strategy usually realises.
"""


def gather_priors(store: StudyStore, study_id: str, space: Space) -> Priors:
    """Gather past winners of the most similar workloads on the same kind of device, and for each strategy the share of
    the maximum saving that past choices realised.

    Args:
        study_id: Study that learns from earlier studies of its owner.
    """
    hardware = space.environment.hardware
    answers = [
        (distance(space.workload, space.environment, study), past)
        for study, past in store.past_recommendations(study_id, hardware.device_kind)
        if past.candidate.choices
    ]
    winners: dict[str, Recommendation] = {}
    for far, past in sorted(answers, key=lambda pair: pair[0]):  # of equal distance, the newest first
        if far < FARTHEST:
            winners.setdefault(past.candidate.key, past)
    chosen = list(winners.values())[:MAX_WINNERS]
    decisions = [
        d for d in store.past_decisions(study_id, hardware) if d.predicted_bound and d.measured_gain is not None
    ]
    audits = [d for d in decisions if d.stage == "audit"]
    return Priors(
        past_winners=tuple(past.candidate for past in chosen),
        past_shares=tuple(past.shares_before for past in chosen),
        realisation=realised_shares(decisions, {s.name: s.likely_part(space.workload) for s in space.strategies}),
        audits=len(audits),
        audit_violations=sum(_violated(decision) for decision in audits),
    )


def realised_shares(decisions: list[Decision], usual: Mapping[str, float]) -> dict[str, float]:
    """Return, for each strategy, the share of its maximum saving that past single changes realised, averaged with the
    usual share.

    Moves that replaced another choice of their strategy do not count: their realisation differs.
    """
    seen: dict[str, list[float]] = defaultdict(list)
    for decision in _first_choices(decisions):
        if decision.predicted_bound and decision.measured_gain is not None:
            saved = 1 - 1 / (1 + max(0.0, decision.measured_gain))
            seen[decision.moves[0].strategy].append(min(1.0, saved / decision.predicted_bound))
    known = {name: parts for name, parts in seen.items() if name in usual}
    return {name: (sum(parts) + WEIGHT * usual[name]) / (len(parts) + WEIGHT) for name, parts in known.items()}


def _first_choices(decisions: list[Decision]) -> list[Decision]:
    """Select the decisions on single changes of strategies that the incumbent had not changed before."""
    found = []
    last, taken = 0, frozenset[str]()
    for decision in decisions:
        if decision.sequence <= last:  # another study begins
            taken = frozenset()
        last = decision.sequence
        if len(decision.moves) == 1 and decision.moves[0].strategy not in taken:
            found.append(decision)
        if decision.verdict == "accepted" and decision.candidate is not None:
            taken = frozenset(decision.candidate.choices)
    return found


def _violated(decision: Decision) -> bool:
    """Say whether the measured gain of a choice exceeds its predicted maximum by more than two standard errors."""
    assert decision.predicted_bound is not None
    assert decision.measured_gain is not None
    gain = math.log1p(decision.measured_gain) - 2 * (decision.measured_se or 0.0)
    return gain > -math.log(max(1e-9, 1 - decision.predicted_bound))
