"""Search by one model, which proposes the whole configuration with the highest expected improvement.

The Gaussian model (`gaussian.py`) is asked about single, double and triple changes of the best configurations, about
random ones, and then about the neighbours of the most promising ones. The expected improvement is weighted by the
probability that a configuration runs and, when time is short, by its cost. A measured configuration is started again
where knowing it better is worth more than anything new (knowledge gradient). The search ends when a better
configuration is unlikely to be left.

Sources: Jones et al., "Efficient Global Optimization" (1998); Frazier, Powell, Dayanik, "The Knowledge-Gradient Policy
for Correlated Normal Beliefs" (2009); Wilson, "Stopping Bayesian Optimization with Probabilistic Regret Bounds" (2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy.special import expit, logit, ndtr

from steptune.tuner.costs.categories import CATEGORIES
from steptune.tuner.records import Candidate, TrialResult
from steptune.tuner.search.evidence import HOST, WHOLE
from steptune.tuner.search.gaussian import Beliefs, Floats, Ints, draws
from steptune.tuner.search.grid import Levels
from steptune.tuner.search.history import NEEDED, History, Proposal
from steptune.tuner.search.knowledge import WORTHWHILE

NUM_BASES = 3
"""Number of best configurations whose single changes are all evaluated."""
NUM_SEVERAL, NUM_RANDOM = 120, 60
"""Numbers of configurations that are evaluated: double and triple changes of the best ones, and random ones."""
ROUNDS, NUM_NEIGHBOURHOODS = 4, 3
"""Number of rounds of the local search, and number of configurations from which each round continues."""
SHORT = 0.15
"""Cost of a run, as a share of the remaining time, that halves the weight of the run."""
NUM_PROPOSALS = 12
NUM_DRAWS, NUM_DRAWN = 256, 120
CAME_TRUE = -1.33
"""Correction added to the log-odds that a better configuration is left, because the model's draws overestimate them
(decisions 62 and 63): 17 % becomes 5 %.
"""
LOOSE, SLACK, UNDONE = 1.3, 0.003, 0.05
"""Tolerances for the bounds on gains, because some bounds are wrong: a factor on each bound; the log gain allowed
beyond the bound for any change; the further log gain allowed for undoing a change.
"""
NO_LIKELIER = 0.02
"""Maximum difference between two configurations' probabilities of running at which they count as equally likely to run.
"""
LATE, LATE_AT_LEAST = 0.75, 8
"""Number of runs per choice, and minimum number of runs, after which every second proposal uses only the step-time
model (decision 63).
"""
WORTH = 0.02
"""Smallest gain, as a share of the step, for which the search continues."""
UNLIKELY = 0.05
"""Probability of a gain of `WORTH` below which the search ends."""
MAX_STARTS = 4
"""Maximum number of runs of one configuration."""
LEAST_WORTH = 2e-4
"""Smallest expected gain of the answer, as a share of the step, for which a configuration is run again."""
TITLES = {str(info.category): info.title for info in CATEGORIES} | {HOST: "host work and kernel launches"}


def expected_improvement(better: Floats, sd: Floats) -> Floats:
    """Return the expected improvement: the mean of a normal gain, with losses counted as 0."""
    z = better / sd
    return np.asarray(better * ndtr(z) + sd * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))


def as_it_came_true(probability: float) -> float:
    """Return the corrected probability that a better configuration is left; the model's draws overestimate it."""
    return float(expit(logit(probability) + CAME_TRUE))


class ModelSearch:
    """Search by the Gaussian model.

    Args:
        ends_below: Probability of a gain of 2 % by another configuration, below which the search ends.
    """

    def __init__(self, ends_below: float = UNLIKELY) -> None:
        self._ends_below = ends_below
        self.probability_left: float | None = None
        """Probability that another configuration is faster than the answer by more than 2 %, at the last call of
        `suggest`.
        """

    def update(self, results: Sequence[TrialResult]) -> None:
        """Keep nothing: the history has all results."""

    def suggest(self, history: History) -> list[Proposal]:
        generator = np.random.default_rng([history.seed, len(history.starts)])
        look = Look(history, generator)
        pool = look.pool()
        self.probability_left = as_it_came_true(look.probability_left(pool)) if len(pool.levels) else 0.0
        simpler = look.simpler()
        if self.probability_left < self._ends_below:
            return simpler
        if _is_turn_of_step(history):
            look = Look(replace(history, by_category=False), generator, bounds=look.bounds)
            pool = look.pool()
        found = look.proposals(pool) if len(pool.levels) else []
        most = max((proposal.worth for proposal in found), default=0.0)
        proposals = [*look.repeats(most), *(proposal.made for proposal in found)]
        if simpler and not (proposals and history.can_pay(proposals[0].candidate, simpler[0].candidate)):
            return simpler
        return proposals


def _is_turn_of_step(history: History) -> bool:
    """Say whether the next proposal uses only the step-time model. That model finds configurations that the model of
    categories misses because of wrong declarations, but needs about as many runs as there are choices.
    """
    num_choices = sum(history.grid.num_levels) - len(history.grid.num_levels)
    late = len(history.starts) - max(LATE_AT_LEAST, int(LATE * num_choices))
    return late >= 0 and late % 2 == 0


class _Worth:
    """Proposal with its expected improvement."""

    def __init__(self, made: Proposal, worth: float) -> None:
        self.made, self.worth = made, worth


class Look:
    """State of the model at one moment, and the configurations that it is asked about.

    Args:
        bounds: Maximum log gain by parameter and level; None takes the model's.
    """

    def __init__(
        self, history: History, generator: np.random.Generator, bounds: Sequence[Floats] | None = None
    ) -> None:
        self._history, self._grid, self._model = history, history.grid, history.model
        self._generator = generator
        self.bounds = self._model.prior.most if bounds is None else bounds
        self._known, self._measured = history.measured
        self._best = int(np.argmin(self._measured.mean))
        self._seen: set[Levels] = set(self._known)
        best = np.array([self._known[self._best]], dtype=np.int64)
        self._best_beliefs = self._model.believe(best)

    # --- which configurations -----------------------------------------------------------------

    def pool(self) -> Beliefs:
        """Return untried configurations that are not known to fail, with the model's posterior of them."""
        order = np.argsort(self._measured.mean)[:NUM_BASES]
        wanted: list[Levels] = []
        for row in order:
            wanted += self._single_changes(self._known[int(row)])
        wanted += [
            self._changed(self._known[self._best], int(self._generator.integers(2, 4))) for _ in range(NUM_SEVERAL)
        ]
        wanted += [self._random() for _ in range(NUM_RANDOM)]
        parts = [self._model.believe(_rows(self._fresh(wanted), self._width))]
        for _ in range(ROUNDS):
            pool = Beliefs.joined(parts)
            if not len(pool.levels):
                break
            liked = np.argsort(-self.improvement(pool))[:NUM_NEIGHBOURHOODS]
            near = [n for row in liked for n in self._single_changes(_key(pool.levels[row]))]
            fresh = self._fresh(near)
            if not fresh:
                break
            parts.append(self._model.believe(_rows(fresh, self._width)))
        return Beliefs.joined(parts)

    @property
    def _width(self) -> int:
        return len(self._grid.parameters)

    def _single_changes(self, levels: Levels) -> list[Levels]:
        return [
            (*levels[:k], level, *levels[k + 1 :])
            for k, parameter in enumerate(self._grid.parameters)
            for level in range(parameter.num_levels)
            if level != levels[k]
        ]

    def _changed(self, levels: Levels, count: int) -> Levels:
        changed = list(levels)
        for k in self._generator.choice(self._width, min(count, self._width), replace=False):
            changed[k] = int(self._generator.integers(self._grid.parameters[k].num_levels))
        return tuple(changed)

    def _random(self) -> Levels:
        return tuple(int(self._generator.integers(parameter.num_levels)) for parameter in self._grid.parameters)

    def _fresh(self, wanted: Iterable[Levels]) -> list[Levels]:
        """Return normalised configurations, each once, without those that cannot be run and without changes that can
        save nothing.
        """
        found = []
        for levels in self._lean(list(wanted)):
            if levels in self._seen:
                continue
            self._seen.add(levels)
            candidate = self._grid.candidate(levels)
            canonical = None if candidate is None else self._grid.levels_of(candidate)
            if candidate is None or canonical is None or (canonical != levels and canonical in self._seen):
                continue
            self._seen.add(canonical)
            if self._history.may_work(candidate):
                found.append(canonical)
        return found

    def _lean(self, wanted: list[Levels]) -> list[Levels]:
        """Return configurations after undoing those changes, relative to the best one, whose bounds allow no saving and
        which do not make the configuration likelier to run.

        What such a change costs is not known, and uncertainty alone would make a configuration worth trying.
        """
        best, most = self._known[self._best], self.bounds
        lean = [
            tuple(
                now if level and level != now and saved[level] <= 0 else level
                for level, now, saved in zip(levels, best, most, strict=True)
            )
            for levels in wanted
        ]
        before, after = (self._history.runs(_rows(some, self._width)) for some in (wanted, lean))
        return [
            less if less != best and x <= y + NO_LIKELIER else full
            for full, less, x, y in zip(wanted, lean, before, after, strict=True)
        ]

    # --- what they promise --------------------------------------------------------------------

    def _better(self, beliefs: Beliefs) -> tuple[Floats, Floats]:
        """Return the mean and standard deviation of the gain over the best, in logarithms."""
        shared = self._model.covariance(self._best_beliefs, beliefs)[0]
        variance = beliefs.variance + self._best_beliefs.variance[0] - 2 * shared
        return self._best_beliefs.mean[0] - beliefs.mean, np.sqrt(np.maximum(variance, 1e-8))

    def improvement(self, beliefs: Beliefs) -> Floats:
        """Return the expected improvement within the bounds, times the probability that the configuration runs."""
        (mean, sd), most = self._better(beliefs), self._most(beliefs.levels)
        promised = expected_improvement(mean, sd) - expected_improvement(mean - most, sd)
        return np.asarray(promised * self._history.runs(beliefs.levels))

    def _most(self, levels: Ints) -> Floats:
        """Return the maximum log gain of configurations over the best, by the bounds of their changes."""
        total = np.zeros(len(levels))
        for k, most in enumerate(self._model.prior.most):
            now = self._known[self._best][k]
            gain = LOOSE * most + SLACK
            if now:
                gain = gain + UNDONE
            gain[now] = 0.0
            total += gain[levels[:, k]]
        return total

    def proposals(self, pool: Beliefs) -> list[_Worth]:
        """Return proposals for the best of the pool, ordered by expected improvement weighted by cost."""
        improvement, (mean, sd) = self.improvement(pool), self._better(pool)
        runs = self._history.runs(pool.levels)
        likely = ndtr(mean / sd) * runs
        found: list[tuple[float, _Worth]] = []
        for row in np.argsort(-improvement):
            candidate = self._grid.candidate(_key(pool.levels[row]))
            if candidate is None or not self._history.can_pay(candidate):
                continue
            if len(found) == 3 * NUM_PROPOSALS:
                break
            reason = self._reason(pool, int(row), float(mean[row]), float(sd[row]), float(likely[row]))
            made = Proposal(candidate=candidate, reason=reason, gain=math.exp(mean[row]), likely=float(likely[row]))
            found.append((float(improvement[row]) * self._patience(candidate), _Worth(made, float(improvement[row]))))
        found.sort(key=lambda pair: -pair[0])
        return [worth for _, worth in found[:NUM_PROPOSALS]]

    def _patience(self, candidate: Candidate) -> float:
        """Return the weight of a candidate by its cost: near 1 while a run takes little of the time left, lower for
        longer runs.
        """
        if not math.isfinite(self._history.left_s):
            return 1.0
        return 1 / (1 + self._history.cost_s(candidate) / (SHORT * max(1.0, self._history.left_s)))

    def _reason(self, pool: Beliefs, row: int, mean: float, sd: float, likely: float) -> str:
        chance = f"{likely:.0%} likely to be the best so far"
        if mean > 0.003:
            return f"expected {math.exp(mean):.2f}x{self._mostly(pool, row)}; {chance}"
        return f"unknown, between {math.exp(mean - sd):.2f}x and {math.exp(mean + sd):.2f}x; {chance}"

    def _mostly(self, pool: Beliefs, row: int) -> str:
        """Describe the category in which a configuration is expected to save most; empty if unknown."""
        categories = self._history.evidence.categories
        if categories == [WHOLE]:
            return ""
        saved = self._best_beliefs.categories_s[0] - pool.categories_s[row]
        most = int(np.argmax(saved))
        return f" from less {TITLES.get(categories[most], categories[most])}" if saved[most] > 0 else ""

    def simpler(self) -> list[Proposal]:
        """Propose the answer without the choices that it may not need; propose nothing if that configuration is not
        new.
        """
        answer = self._grid.levels_of(self._history.answer())
        assert answer is not None
        lean = answer
        while (less := self._one_less(lean)) is not None:
            lean = less
        candidate = self._grid.candidate(lean)
        if candidate is None or lean in self._known or not self._history.may_work(candidate):
            return []
        if not self._history.can_pay(candidate):
            return []
        return [Proposal(candidate=candidate, reason="may be as fast with fewer changes")]

    def _one_less(self, levels: Levels) -> Levels | None:
        """Return the configuration without the change whose removal has the smallest expected loss; None where that
        loss is likely or large.
        """
        undone = [self._grid.candidate((*levels[:k], 0, *levels[k + 1 :])) for k in range(self._width) if levels[k]]
        legal = [other for c in undone if c is not None and (other := self._grid.levels_of(c)) is not None]
        if not legal:
            return None
        mean, likely = self._history.loses(_rows(legal, self._width))
        best = int(np.argmin(mean))
        return legal[best] if likely[best] < NEEDED and mean[best] < WORTHWHILE else None

    # --- again, or not at all -----------------------------------------------------------------

    def repeats(self, most: float) -> list[Proposal]:
        """Propose another run of the measured configuration that is most worth repeating, unless a new configuration
        promises more.
        """
        if len(self._known) < 2:
            return []
        covariance = self._model.covariance(self._measured, self._measured)
        worths = [self._worth_of_repeat(row, covariance) for row in range(len(self._known))]
        row = int(np.argmax(worths))
        candidate = self._grid.candidate(self._known[row])
        if worths[row] <= max(most, LEAST_WORTH) or candidate is None or not self._history.can_pay(candidate):
            return []
        return [Proposal(candidate=candidate, reason="measured again to decide between the best candidates")]

    def _worth_of_repeat(self, row: int, covariance: Floats) -> float:
        candidate = self._grid.candidate(self._known[row])
        if candidate is None:
            return 0.0
        starts = sum(result.ok for result in self._history.knowledge.results.get(candidate.key, []))
        if starts >= MAX_STARTS:
            return 0.0
        others = [n for n in range(len(self._known)) if n != row]
        other = min(others, key=lambda n: self._measured.mean[n])
        variance = covariance[row, row] + covariance[other, other] - 2 * covariance[row, other]
        noise = self._model.start_noise(self._history.knowledge.is_calm(candidate))
        moved = variance / math.sqrt(variance + noise**2) if variance > 1e-10 else 0.0
        if moved <= 0:
            return 0.0
        distance = abs(self._measured.mean[row] - self._measured.mean[other])
        return float(expected_improvement(np.array([-distance]), np.array([moved]))[0])

    def probability_left(self, pool: Beliefs) -> float:
        """Return the probability, from joint draws, that another configuration, measured or not, saves more than
        `WORTH` of the best one's step.
        """
        rows = np.argsort(-self.improvement(pool))[:NUM_DRAWN]
        rivals = np.delete(self._measured.levels, self._best, axis=0)
        others = np.concatenate([pool.levels[rows], rivals])
        some = self._model.believe(np.concatenate([self._best_beliefs.levels, others]))
        samples = draws(some.mean, self._model.covariance(some, some), NUM_DRAWS, self._generator)
        chances = np.concatenate([self._history.runs(pool.levels[rows]), np.ones(len(rivals))])
        most = np.concatenate([self._most(pool.levels[rows]), np.full(len(rivals), np.inf)])
        runs = self._generator.random((NUM_DRAWS, len(others))) < chances
        gains = np.where(runs, np.minimum(samples[:, :1] - samples[:, 1:], most), -np.inf)
        return float((gains.max(1) > -math.log(1 - WORTH)).mean())


def _key(row: Floats) -> Levels:
    return tuple(int(level) for level in row)


def _rows(levels: Sequence[Levels], width: int) -> np.ndarray:
    return np.array(levels, dtype=np.int64).reshape(len(levels), width)
