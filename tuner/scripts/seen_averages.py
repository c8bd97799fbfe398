"""Averages of the weights that a script keeps in addition to its model, found in guarded steps by their recurrence.

A script does not name its averages: a candidate's average is the tensor that follows the weight by the reference's
shares. Steps that begin from the reference's weights again show no average.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from steptune.tuner.guard.averages import LIMIT, Average, AverageScore, StateStep, find_averages, worst_average
from steptune.tuner.records import GuardCheck
from steptune.tuner.scripts.seen_weights import weights_after
from steptune.tuner.trials.guard_checks import GUARDED_DEVICES, gated

Seen = dict[str, Any]


def check_averages(
    reference: Seen, repeated: Seen, candidate: Seen, number: int, device: str
) -> tuple[list[GuardCheck], list[str]]:
    """Check averages of the weights by their recurrence; return the check, and a note on what could not be checked."""
    if any(seen["too_many_held"] for seen in (reference, repeated, candidate)):
        return [], ["averages of the weights: the script holds too many tensors with the shapes of its parameters"]
    averages = averages_in(reference, number)
    if not averages:
        return [], []
    if worst_held(averages, repeated, number).score > LIMIT:
        return [], ["averages of the weights: a repeated run of today's settings follows a different recurrence"]
    found = worst_held(averages, candidate, number)
    detail = (
        f"at step {found.step}, {found.name} takes {found.share:.3g} of the weight, but {found.wanted:.3g} in the "
        "reference"
    )
    return [gated("averages", "average", found.score, LIMIT, detail, device in GUARDED_DEVICES)], []


def averages_in(seen: Seen, number: int) -> tuple[Average, ...]:
    """Return the tensors of a run that, in its first steps, are averages of a weight."""
    steps = _states(seen, number)
    found = (find_averages([_only(step, held, weight) for step in steps]) for held, weight in _likely(steps))
    return tuple(average for averages in found for average in averages)


def worst_held(averages: Sequence[Average], seen: Seen, number: int) -> AverageScore:
    """Return the worst score of the reference's averages in a run; each average is compared with the tensor of the
    script that matches it best.
    """
    steps = _states(seen, number)
    best = (min(_scores(average, steps), key=_score, default=_missing(average)) for average in averages)
    return max(best, key=_score, default=AverageScore())


def _scores(average: Average, steps: Sequence[StateStep]) -> Iterator[AverageScore]:
    """Yield the score of each tensor that may be the given average. The tensor that is this average in the reference
    comes first; a tensor that fits ends the search.
    """
    weight = steps[0].weights.get(average.weight) if steps else None
    if weight is None:
        return
    names = [name for name, value in steps[0].before.items() if value.shape == weight.shape]
    for name in sorted(names, key=lambda name: name != average.name):
        found = worst_average([Average(name=name, weight=average.weight, shares=average.shares)], steps)
        yield AverageScore(
            score=found.score,
            step=found.step,
            name=f"the average of {average.weight}",
            share=found.share,
            wanted=found.wanted,
        )
        if found.score <= 1.0:
            return


def _missing(average: Average) -> AverageScore:
    return AverageScore(score=float("inf"), name=f"the average of {average.weight}", wanted=average.shares[0])


def _score(found: AverageScore) -> float:
    return found.score


def _states(seen: Seen, number: int) -> list[StateStep]:
    """Return, for each pair of consecutive steps, the tensors that may be averages after each of the two steps, and the
    weights after the first step.
    """
    steps = seen["steps"][:number]
    roundoff = max((update["roundoff"] for step in steps for update in step["updates"]), default=0.0)
    weights = weights_after(steps)
    return [
        StateStep(
            before=before["held"],
            after=after["held"],
            weights=weights[place],
            roundoffs={**dict.fromkeys(weights[place], roundoff), **seen["roundoffs"]},
        )
        for place, (before, after) in enumerate(itertools.pairwise(steps))
    ]


def _likely(steps: Sequence[StateStep]) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor that changes and may be an average, with the name of the weight towards which it
    moves.
    """
    if not steps:
        return
    first = steps[0]
    for held, before in first.before.items():
        change = first.after[held] - before
        alike = [name for name, value in first.weights.items() if value.shape == before.shape]
        if not alike or not bool(change.any()) or not bool(change.isfinite().all()):
            continue
        ways = torch.stack([first.weights[name] - before for name in alike])
        squares = ways.square().sum(1).clamp_min(1e-300)
        left = (change - (ways @ change / squares)[:, None] * ways).square().sum(1)
        yield held, alike[int(left.argmin())]


def _only(step: StateStep, held: str, weight: str) -> StateStep:
    return StateStep(
        before={held: step.before[held]},
        after={held: step.after[held]},
        weights={weight: step.weights[weight]},
        roundoffs=step.roundoffs,
    )
