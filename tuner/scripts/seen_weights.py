"""Weights in a script's guarded steps: their distance from the reference's, and changes to them between updates.

Each update is replayed from the weights before it, so that a change behind an update, like weights that are cut off or
averaged, is no part of any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steptune.tuner.guard.gradients import distances, measure_distances

Seen = dict[str, Any]
_ROUNDING = 2.0**-23


@dataclass(frozen=True, kw_only=True)
class Between:
    """Change of weights between two updates that does not occur in the reference.

    Attributes:
        score: Norm of the change, in units of the weights' last digit.
        is_compared: Whether it is compared; False where the reference's loop changes weights as well.
    """

    score: float = 0.0
    name: str = ""
    step: int = 0
    is_compared: bool = True


def weights_after(steps: Sequence[Seen]) -> list[dict[str, torch.Tensor]]:
    """Return the weights after each step, by optimizer and position in it."""
    return [
        {f"{update['number']}.{name}": value for update in step["updates"] for name, value in update["after"].items()}
        for step in steps
    ]


def distances_from(
    reference: Sequence[Seen], disturbed: Sequence[Sequence[Seen]], found: Sequence[Seen]
) -> list[float]:
    """Return the distance of a candidate's weights from the reference's after each step, as a multiple of a disturbed
    run's.
    """
    wanted = weights_after(reference)
    noise = measure_distances(wanted, [weights_after(run) for run in disturbed])
    return distances(wanted, noise, weights_after(found))


def changes_between(known: Sequence[Sequence[Seen]], found: Sequence[Seen]) -> Between:
    """Return the largest change between updates of a tensor that no run of today's settings changes there.

    Args:
        known: Steps of the reference, of its repetition, and of its disturbed runs: what a loop cuts off at a bound
            may stay below it at one step of one run.
    """
    changed = {name for steps in known for _, name, *_ in _changes(steps)}
    worst = Between()
    for place, name, change, weights in _changes(found):
        if name in changed:
            continue
        norm = _ROUNDING * float(weights.norm())
        score = float(change.norm()) / norm if norm else math.inf
        if not score <= worst.score:
            worst = Between(score=score if math.isfinite(score) else math.inf, name=name, step=place)
    return worst if worst.name or not changed else Between(is_compared=False)


def _changes(steps: Sequence[Seen]) -> Iterator[tuple[int, str, torch.Tensor, torch.Tensor]]:
    """Yield tensors changed between an optimizer's update and its next: first update, name, change, weights."""
    last: dict[int, Seen] = {}
    for place, step in enumerate(steps, start=1):
        for update in step["updates"]:
            before = last.get(update["number"], {"after": {}})
            for name, weights in before["after"].items():
                now = update["before"].get(name)
                if now is not None and not torch.equal(now, weights):
                    yield place - 1, f"{name} of {update['kind']} {update['number']}", now - weights, weights
            last[update["number"]] = update
