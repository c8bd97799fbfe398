"""Changes of weights between updates, in guarded steps that follow one another without a reset.

Each update is replayed from the weights before it, so that a change between two updates, such as clipping or averaging
of weights, is no part of either. A tensor that today's settings never change between updates must not change there in a
candidate; one that they change between all updates must change. The changes themselves are not compared.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptune.tuner.guard.gradients import Tensors
from steptune.tuner.records import Record

if TYPE_CHECKING:
    import torch

Updates = Mapping[str, Sequence[tuple[Tensors, Tensors]]]
"""For each optimizer, the weights before and after each update, in the order of the updates."""
_ROUNDING = 2.0**-23


class Moves(Record):
    """Tensors that change between updates in runs with today's settings.

    Attributes:
        ever: Names of the tensors that some run changes.
        always: Names of the tensors that every run changes between all its updates.
    """

    ever: tuple[str, ...] = ()
    always: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Between:
    """Largest deviation from training with today's settings in how weights change between two updates.

    Attributes:
        score: Norm of the change, in units of the weights' last digit; infinite where a change is missing.
        name: Name of the tensor; empty where there is no difference.
        update: Number of the update before the change, from 1; 0 where a change is missing.
    """

    score: float = 0.0
    name: str = ""
    update: int = 0

    @property
    def detail(self) -> str:
        if not self.name:
            return ""
        if not self.update:
            return f"{self.name} does not change between updates; with today's settings it changes between all of them"
        return (
            f"{self.name} changes by {self.score:.2g} units in the last place between updates {self.update} and "
            f"{self.update + 1}; with today's settings it does not change there"
        )


def moves_of(runs: Iterable[Updates]) -> Moves:
    """Return the tensors that change between updates in runs with today's settings."""
    found = [_moved(updates) for updates in runs]
    ever = {name for moved in found for name in moved}
    always = {name for name in ever if all(moved.get(name, False) for moved in found)}
    return Moves(ever=tuple(sorted(ever)), always=tuple(sorted(always)))


def joined(first: Moves, second: Moves) -> Moves:
    """Combine the names of tensors that change between updates in two groups of runs."""
    return Moves(
        ever=tuple(sorted({*first.ever, *second.ever})), always=tuple(sorted({*first.always} & {*second.always}))
    )


def worst_between(updates: Updates, moves: Moves) -> Between:
    """Return a candidate's largest deviation from today's settings in how weights change between updates."""
    moved = _moved(updates)
    missing = next((name for name in moves.always if name not in moved), None)
    if missing is not None:
        return Between(score=math.inf, name=missing)
    return max(
        (_scored(*change) for change in _changes(updates) if change[0] not in moves.ever),
        key=lambda found: found.score,
        default=Between(),
    )


def _moved(updates: Updates) -> dict[str, bool]:
    """Return the tensors that change between updates, with True for a tensor that changes between all updates of its
    optimizer.
    """
    counts = Counter(name for name, *_ in _changes(updates))
    possible = Counter(
        f"{name} of {optimizer}"
        for optimizer, pairs in updates.items()
        for (_, after), (before, _) in itertools.pairwise(pairs)
        for name in after.keys() & before.keys()
    )
    return {name: count == possible[name] for name, count in counts.items()}


def _scored(name: str, update: int, change: torch.Tensor, weights: torch.Tensor) -> Between:
    norm = _ROUNDING * float(weights.norm())
    score = float(change.norm()) / norm if norm else math.inf
    return Between(score=score if math.isfinite(score) else math.inf, name=name, update=update)


def _changes(updates: Updates) -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor]]:
    """Yield the tensors that change between an update and the next: name, number of the update, change, weights."""
    for optimizer, pairs in updates.items():
        for number, ((_, after), (before, _)) in enumerate(itertools.pairwise(pairs), start=1):
            for name, weights in after.items():
                now = before.get(name)
                if now is not None and not bool((now == weights).all()):
                    yield f"{name} of {optimizer}", number, now - weights, weights
