"""History given to a search: all measurements, what may still be tried, and its cost.

A search proposes configurations; the designer asks it, runs what can be run, judges, and keeps the record. Searches are
chosen by name (`steptune tune --search NAME`): see `searches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy.special import ndtr

from steptune.tuner.records import Candidate, TrialResult
from steptune.tuner.search.blame import Blame, Room
from steptune.tuner.search.evidence import Evidence
from steptune.tuner.search.gaussian import Beliefs, Floats, Ints, StepModel
from steptune.tuner.search.grid import Grid, Levels
from steptune.tuner.search.knowledge import Knowledge
from steptune.tuner.search.space import Space

IDLE = 0.003
"""Difference, as a share of the step, below which two configurations count as equal, and the one with fewer changes is
preferred.
"""
NEEDED = 0.8
"""Minimum probability that leaving out a choice costs more than `IDLE`, for the choice to count as needed. The answer
is not tried without a needed choice.
"""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Configuration to run next, with the reason.

    Attributes:
        reason: Human-readable reason, one line.
        gain: Expected rate relative to the best so far; None where the search has none.
        likely: Probability that it is the best so far; None where the search has none.
    """

    candidate: Candidate
    reason: str = ""
    gain: float | None = None
    likely: float | None = None


class Search(Protocol):
    """Interface of a search, which chooses the next trials.

    A search may keep the results given to `update`; a resumed study gives it all of them again, in order. The same
    history must lead to the same proposals: chance comes from the history's seed.
    """

    def suggest(self, history: History) -> Sequence[Proposal]:
        """Propose configurations to run next, the best first. The first one that can be run within the budget is run,
        even if it was measured before. An empty sequence ends the search.
        """

    def update(self, results: Sequence[TrialResult]) -> None:
        """Learn from the runs that have ended since the last call, failed runs included."""


@dataclass(frozen=True)
class History:
    """Knowledge of a study at the time when its search is asked for proposals.

    Attributes:
        knowledge: Results, costs and profiles by configuration.
        starts: Every run so far, in order.
        incumbent: The best measured configuration, by everything measured.
        left_s: Seconds that the search may still take.
        num_left: Trials that the search may still make.
        seed: Seed of all random choices.
        realisation: Share of its bound that each strategy realised in earlier studies.
        by_category: Whether the model is of categories; else of the step alone, without profiles, bounds and
            expectations.
    """

    grid: Grid
    knowledge: Knowledge
    starts: Sequence[TrialResult]
    incumbent: Candidate
    left_s: float
    num_left: int
    seed: int
    realisation: Mapping[str, float] = field(default_factory=dict)
    by_category: bool = True

    @property
    def space(self) -> Space:
        """Space of legal choices and combinations."""
        return self.grid.space

    def cost_s(self, candidate: Candidate) -> float:
        """Return the expected seconds of a run, without compilation if a measured configuration has the same compiled
        model.
        """
        knowledge = self.knowledge
        bases = {self.incumbent.key: self.incumbent}
        bases |= {c.key: c for c in knowledge.measured() if not self.space.compiles_again(candidate, c)}
        return min(knowledge.expected_cost_s(candidate, base) for base in bases.values())

    def may_work(self, candidate: Candidate) -> bool:
        """Say whether a configuration may work: it is not known to fail or to have no effect."""
        knowledge = self.knowledge
        if knowledge.failed(candidate) or knowledge.had_no_effect(candidate):
            return False
        return knowledge.will_not_fit(candidate) is None

    def can_pay(self, *candidates: Candidate) -> bool:
        """Say whether one run of each configuration, compilation included, is expected to end in the time left."""
        seconds = sum(self.cost_s(candidate) for candidate in candidates)
        return self.num_left >= len(candidates) and seconds <= self.left_s

    # --- the model ----------------------------------------------------------------------------

    @cached_property
    def evidence(self) -> Evidence:
        return Evidence(self.grid, self.knowledge, self.starts, self.realisation, by_category=self.by_category)

    @cached_property
    def model(self) -> StepModel:
        """Gaussian model of everything measured."""
        return StepModel(self.evidence.prior(self.incumbent), self.evidence.measured())

    @cached_property
    def measured(self) -> tuple[list[Levels], Beliefs]:
        """Configurations that ran and took effect, with the model's current posterior of their step times."""
        levels = sorted({tuple(map(int, row)) for row in self.model.measured.levels})
        return levels, self.model.believe(np.array(levels, dtype=np.int64))

    @cached_property
    def _blame(self) -> Blame:
        failed = self.evidence.did_not_run(self.starts, out_of_memory=False)
        ran = self._rows(list(self.evidence.ran()))
        return Blame(self.grid.num_levels, ran, self._rows(list(failed)), list(failed.values()))

    @cached_property
    def _room(self) -> Room:
        ran = self.evidence.ran()
        ran_out = self.evidence.did_not_run(self.starts, out_of_memory=True)
        peaks = np.array(list(ran.values()), dtype=np.float64)
        directions = [parameter.memory_directions for parameter in self.grid.parameters]
        return Room(self.grid.num_levels, self._rows(list(ran)), peaks, self._rows(list(ran_out)), directions)

    def runs(self, levels: Ints) -> Floats:
        """Return, for each configuration, the probability that it runs."""
        return self._blame.runs(levels) * self._room.fits(levels)

    def _rows(self, levels: Sequence[Levels]) -> Ints:
        return np.array(levels, dtype=np.int64).reshape(len(levels), len(self.grid.parameters))

    def loses(self, levels: Ints) -> tuple[Floats, Floats]:
        """Return the expected loss of each configuration relative to the answer, as a logarithm, and the probability
        that the loss exceeds `IDLE`.
        """
        best = self.grid.levels_of(self.answer())
        both = self.model.believe(np.concatenate([np.array([best], dtype=np.int64), levels]))
        covariance = self.model.covariance(both, both)
        variance = covariance[0, 0] + np.diag(covariance) - 2 * covariance[0]
        mean = (both.mean - both.mean[0])[1:]
        return mean, np.asarray(ndtr((mean - IDLE) / np.sqrt(np.maximum(variance[1:], 1e-10))))

    def answer(self) -> Candidate:
        """Return the measured configuration with the lowest expected step time; among equals, the one with the fewest
        changes.
        """
        levels, beliefs = self.measured
        good = [n for n, mean in enumerate(beliefs.mean) if mean < beliefs.mean.min() + IDLE]
        best = min(good, key=lambda n: (np.count_nonzero(levels[n]), beliefs.mean[n]))
        found = self.grid.candidate(levels[best])
        return self.grid.reference if found is None else found
