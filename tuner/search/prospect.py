"""Probable gain from more tuning time, in one sentence, for a study that spent its budget.

A search that knows probabilities is asked for its next proposals as if time were left. For any other search only the
next choice is named, by what is known of every choice: its bound, the part of it that such a choice usually realises,
and what a trial of it is expected to take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from steptune.tuner.records import Candidate, Move, choice_label
from steptune.tuner.search.designer import BUDGET_SPENT, Designer
from steptune.tuner.search.history import Proposal
from steptune.tuner.search.model_search import WORTH, ModelSearch
from steptune.tuner.wording import counted

SOON_S, NUM_SAID = 60.0, 5
"""Maximum total seconds of the next trials that are described together, and maximum number of these trials."""
LEAST_SAID = 1.005
"""Minimum expected speed that is reported, as a ratio to the best so far."""


def prospect(designer: Designer) -> str:
    """Describe the probable result of a few more minutes; empty unless the search ended by spending its budget."""
    if designer.ended != BUDGET_SPENT or not designer.baseline_results():
        return ""
    if isinstance(designer.search, ModelSearch):
        return _by_model(designer, designer.search)
    return _by_bounds(designer)


def _by_model(designer: Designer, search: ModelSearch) -> str:
    """Describe the prospect by the probabilities that the model search computes."""
    history = replace(designer.history, left_s=math.inf, num_left=NUM_SAID)
    fresh = [p for p in search.suggest(history) if p.likely is not None and not designer.knowledge.was_run(p.candidate)]
    if not fresh:
        return ""
    cost_s = history.cost_s(fresh[0].candidate)
    soon = fresh[: max(1, min(NUM_SAID, int(SOON_S / max(1.0, cost_s))))]
    seconds = sum(history.cost_s(proposal.candidate) for proposal in soon)
    left = search.probability_left
    anything = "" if left is None else f"; the chance that any other configuration is {WORTH:.0%} faster is {left:.0%}"
    return (
        f"The next {_duration(seconds)} would try {counted(len(soon), 'configuration')}: the first, "
        f"{_changed(designer, fresh[0])}, has a chance of {fresh[0].likely:.0%} to become the best so "
        f"far{_expected(fresh[0])}{anything}."
    )


def _expected(proposal: Proposal) -> str:
    """Describe the expected speed of a proposal; empty for a trial that only serves to learn."""
    if proposal.gain is None or proposal.gain < LEAST_SAID:
        return ""
    return f" and is expected to be {proposal.gain:.2f}× as fast as the recommendation"


def _by_bounds(designer: Designer) -> str:
    """Describe the prospect by the savings of untried choices: the maximum saving, and the saving usually realised."""
    knowledge, space, incumbent = designer.knowledge, designer.space, designer.incumbent
    found: list[tuple[float, float, Move, Candidate]] = []
    for move, bound in knowledge.untried(incumbent):
        moved = space.combine(incumbent, [move])
        if moved is not None and bound > knowledge.threshold(incumbent) and not knowledge.known_to_fail(moved):
            usual = bound * space.strategy(move.strategy).likely_part(space.workload)
            found.append((usual, bound, move, moved))
    if not found:
        return ""
    usual, bound, move, moved = max(found, key=lambda row: row[0])
    cost_s = knowledge.expected_cost_s(moved, incumbent)
    return (
        f"{counted(len(found), 'choice')} may still save time, but this search does not estimate how likely that "
        f"is. The next, {_label([move])}, takes about {_duration(cost_s)}, usually saves {usual:.1%} of the step, "
        f"and saves at most {bound:.0%}."
    )


def _changed(designer: Designer, proposal: Proposal) -> str:
    """Name the choices in which a proposal differs from the best configuration so far."""
    ours, theirs = proposal.candidate.choices, designer.incumbent.choices
    names = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name, {}) != theirs.get(name, {})]
    return _label([Move(strategy=name, choice=ours.get(name, {})) for name in names])


def _label(moves: Sequence[Move]) -> str:
    return " and ".join(f"{move.strategy}: {choice_label(move.choice)}" for move in moves)


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 120 else f"{round(seconds / 60)} min"
