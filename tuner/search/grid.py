"""Space of a study as whole numbers: one parameter for each strategy, one level for each of its choices.

Level 0 of every parameter is the reference's choice. Searches of any kind work on these numbers; the space says which
combinations are legal, and how they are normalised.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steptune.tuner.records import BASELINE, Candidate, Choice, Move
from steptune.tuner.search.space import Space
from steptune.tuner.strategies import Strategy

Levels = tuple[int, ...]
"""Configuration as the level of every parameter."""


@dataclass
class Parameter:
    """Strategy with the choices that the study may make.

    Attributes:
        options: Choices; the reference's first. The empty one is what the user runs today.
        ranks: Rank of each option in the order of its values, from 0 to 1; None where they have no order.
    """

    name: str
    strategy: Strategy
    options: list[Choice]
    ranks: NDArray[np.float64] | None

    @property
    def num_levels(self) -> int:
        return len(self.options)

    @property
    def memory_directions(self) -> list[int]:
        """Memory effect of every option: -1 if it saves memory, 1 if it gives up a saving of the reference, else 0."""
        if not self.strategy.memory:
            return [0] * self.num_levels
        return [bool(self.options[0]) - bool(option) for option in self.options]


class Grid:
    """Configurations of a space as levels of parameters."""

    def __init__(self, space: Space, reference: Candidate) -> None:
        self.space = space
        self.reference = reference
        self.parameters = [self._parameter(name) for name in self._names()]
        self._index = {parameter.name: k for k, parameter in enumerate(self.parameters)}
        self._made: dict[Levels, Candidate | None] = {}
        self._levels: dict[str, Levels] = {reference.key: self.origin}

    def _names(self) -> Iterable[str]:
        names = dict.fromkeys([move.strategy for move in self.space.moves] + list(self.reference.choices))
        # Where nothing can be tried, the model is of a parameter that has one level.
        return names or [self.space.strategies[0].name]

    def _parameter(self, name: str) -> Parameter:
        first = self.reference.choices.get(name, {})
        others: list[Choice] = [{}, *(move.choice for move in self.space.moves if move.strategy == name)]
        options = [first, *(choice for choice in others if choice != first)]
        strategy = self.space.strategy(name)
        complete = [strategy.complete(choice, self.space.workload) for choice in options]
        return Parameter(name=name, strategy=strategy, options=options, ranks=order_of(strategy, complete))

    @property
    def origin(self) -> Levels:
        """Levels of the reference: all 0."""
        return (0,) * len(self.parameters)

    @property
    def num_levels(self) -> list[int]:
        return [parameter.num_levels for parameter in self.parameters]

    def candidate(self, levels: Levels) -> Candidate | None:
        """Return the configuration with these levels, or None where it cannot be run."""
        if levels not in self._made:
            moves = [
                Move(strategy=parameter.name, choice=parameter.options[level])
                for parameter, level in zip(self.parameters, levels, strict=True)
                if parameter.options[level]
            ]
            candidate = self.space.combine(BASELINE, moves)
            self._made[levels] = candidate
            canonical = None if candidate is None else self._canonical(candidate, levels)
            if candidate is not None and canonical is not None:
                self._levels.setdefault(candidate.key, canonical)
        return self._made[levels]

    def levels_of(self, candidate: Candidate) -> Levels | None:
        """Return the levels of a configuration; None where one of its choices is not in the space."""
        if candidate.key not in self._levels:
            levels = self._canonical(candidate, None)
            if levels is None:
                return None
            self._levels[candidate.key] = levels
        return self._levels[candidate.key]

    def _canonical(self, candidate: Candidate, made_of: Levels | None) -> Levels | None:
        """Return the levels of a normalised candidate; for a choice that is not among the options, use the level in
        `made_of`.
        """
        if candidate.choices.keys() - self._index.keys():
            return None
        found = []
        for k, parameter in enumerate(self.parameters):
            choice = candidate.choices.get(parameter.name, {})
            if choice in parameter.options:
                found.append(parameter.options.index(choice))
            elif made_of is not None:
                found.append(made_of[k])
            else:
                return None
        return tuple(found)

    def move(self, index: int, level: int) -> Move:
        """Return the move that sets one parameter to a level."""
        parameter = self.parameters[index]
        return Move(strategy=parameter.name, choice=parameter.options[level])


def order_of(strategy: Strategy, complete: list[Choice]) -> NDArray[np.float64] | None:
    """Return the ranks of the choices, scaled to the range from 0 to 1, if they differ in exactly one parameter and it
    is numeric; else None.
    """
    differing = [name for name in strategy.defaults if len({repr(choice.get(name)) for choice in complete}) > 1]
    if len(complete) < 3 or len(differing) != 1 or not strategy.has_order:
        return None
    values = [choice[differing[0]] for choice in complete]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return None
    order = sorted(set(values))  # type: ignore[type-var]
    return np.array([order.index(value) for value in values]) / (len(order) - 1)
