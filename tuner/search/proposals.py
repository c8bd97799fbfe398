"""What could be tried next on an incumbent, with what it promises for its cost.

Pure functions of what is known: nothing here runs, judges or remembers anything.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steptune.tuner.records import Candidate, Finding, Move
from steptune.tuner.search.groups import covering_group
from steptune.tuner.search.knowledge import WORTHWHILE, Knowledge, Priors
from steptune.tuner.search.space import Space
from steptune.tuner.strategies.composition import TOGETHER

EXPENSIVE_S = 8.0
"""Choices whose trials cost more than this are tried alone only."""
HARMFUL = -0.09
"""Choices that seemed worse than this alone are not tried in company."""
USUAL_INTERACTION = 0.06
"""Part of a joint bound that choices without a gain of their own realise in company."""
MIN_GROUP = 3
CURE = 0.3
"""Part of its bound that a strategy must usually realise to be part of a recipe."""
HOPE = 0.35
"""Part of its bound that a choice may realise which was never measured because memory ran out."""
UNLIKELY = 0.15
WORTH_TRYING_EARLY, CHEAP_PART = 0.03, 0.25
"""Expected gain, and part of a compilation's trial that it may cost, of what is tried before the compilation."""
MUCH_MORE = 1.25
"""Times what a cheaper choice promises, something else must promise to be tried before it while there is time."""
LITTLE_MORE = 2.0
"""Times the cost of a strategy's cheaper choice, that one which promises more may cost to be tried at once."""
MAX_STARTS = 2
"""Times that one candidate is run for one verdict."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Moves on an incumbent, and why."""

    candidate: Candidate
    moves: tuple[Move, ...]
    reason: str
    expected: float = 0.0
    """Part of the step that it is expected to save."""
    score: float = 0.0
    """That for the square root of its cost."""
    bound: float | None = None
    simpler: bool = False
    """Something is left out."""


class Proposals:
    """Proposals for one incumbent at one moment.

    Args:
        left_s: Seconds that trials may still take.
        seed: Breaks ties between groups.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        priors: Priors,
        incumbent: Candidate,
        *,
        left_s: float,
        seed: int,
        groups_tried: int = 0,
    ) -> None:
        self._knowledge = knowledge
        self._space: Space = knowledge.space
        self._priors = priors
        self._incumbent = incumbent
        self._left_s = left_s
        self._seed = seed
        self._groups_tried = groups_tried
        self._threshold = knowledge.threshold(incumbent)

    # --- single moves -------------------------------------------------------------------------

    def next_move(self) -> Proposal | None:
        """The untried single choice, the exchange or the group that promises most.

        Before a long compilation comes what would make it necessary once more afterwards.
        """
        singles = self._single_moves()
        options = [*singles, *self._enabled(), *self._exchanges(), *self._neutral_groups()]
        best = max(options, key=lambda proposal: proposal.score, default=None)
        if best is None:
            return None
        best = self._last_chance(best, options)
        if not any(self._expensive(move) for move in best.moves):
            return best
        earlier = [p for p in singles if self._is_cheaper_now(p, best) and self._fits_after(p, best)]
        return max(earlier, key=lambda proposal: proposal.score, default=best)

    def _last_chance(self, best: Proposal, options: Sequence[Proposal]) -> Proposal:
        """What promises much more than `best` and could no longer be afforded after it, or more for a little more time
        and instead of it; else `best`.
        """
        chances = [p for p in options if self._is_lost_after(best, p) or self._is_worth_it(p, best)]
        return max(chances, key=lambda proposal: proposal.score, default=best)

    def _is_lost_after(self, first: Proposal, proposal: Proposal) -> bool:
        return proposal.expected > MUCH_MORE * first.expected and not self._fits_after(first, proposal)

    def _is_worth_it(self, proposal: Proposal, cheaper: Proposal) -> bool:
        """Whether it is another choice of the same strategies that promises more, for at most twice the cost."""
        same = {move.strategy for move in proposal.moves} == {move.strategy for move in cheaper.moves}
        affordable = self._cost_s(proposal) <= LITTLE_MORE * self._cost_s(cheaper)
        return same and affordable and proposal.expected > cheaper.expected

    def _fits_after(self, first: Proposal, second: Proposal) -> bool:
        return self._cost_s(first) + self._cost_s(second) <= self._left_s

    def _cost_s(self, proposal: Proposal) -> float:
        return self._knowledge.expected_cost_s(proposal.candidate, self._incumbent)

    def _is_cheaper_now(self, proposal: Proposal, compiled: Proposal) -> bool:
        """Whether a change would compile anew what another is about to compile, pays, and costs a fraction now."""
        (move,) = proposal.moves
        strategy = self._space.strategy(move.strategy)
        if not strategy.recompiles or move.strategy in {m.strategy for m in compiled.moves}:
            return False
        cheap = self._cost_s(proposal) < CHEAP_PART * self._cost_s(compiled)
        return proposal.expected > WORTH_TRYING_EARLY and cheap

    def _single_moves(self) -> list[Proposal]:
        found = []
        for move in self._space.moves:
            candidate = self.fresh([move])
            if candidate is None or move.key in self._knowledge.verdicts:
                continue
            bound = self._knowledge.bound(move, self._incumbent)
            if bound > self._threshold:
                expected = self._expected(move, bound) * 0.5 ** self._knowledge.failures(move.strategy)
                reason = f"could save at most {bound:.0%} of the step"
                found.append(self._proposal(candidate, [move], reason, expected, bound))
        return found

    def _enabled(self) -> list[Proposal]:
        """Choices that are legal only beside one of a strategy that shares a resource with theirs, each with the one of
        those that promises most. Of both is expected what the better one promises: they attack the same.
        """
        found = []
        for row in TOGETHER:
            for first, second in itertools.permutations(row.strategies):
                for move in self._illegal_alone(second):
                    partners = [m for m in self._space.moves if m.strategy == first and self.fresh([m, move])]
                    if not partners:
                        continue
                    both = [max(partners, key=self._promise), move]
                    candidate, bound = self.fresh(both), self._joint_bound(both)
                    if candidate is not None and bound > self._threshold:
                        expected = max(self._promise(m) for m in both)
                        found.append(self._proposal(candidate, both, row.reason, expected, bound))
        return found

    def _illegal_alone(self, name: str) -> list[Move]:
        """Untried choices that are not legal beside the incumbent, of a strategy that it does not have."""
        if name in self._incumbent.choices:
            return []
        untried = [m for m in self._space.moves if m.strategy == name and not self._knowledge.was_tried(m)]
        return [move for move in untried if self._space.combine(self._incumbent, [move]) is None]

    def _promise(self, move: Move) -> float:
        return self._expected(move, self._knowledge.bound(move, self._incumbent))

    def _exchanges(self) -> list[Proposal]:
        """Choices that ran out of memory, as the incumbent is now or beside something that needs less.

        What is given up must be expected to lose less than the choice may gain.
        """
        found = []
        for move in self._space.moves:
            if not self._knowledge.ran_out_of_memory(move):
                continue
            limit = self._knowledge.smallest_failure(move)
            hope = max(self._realisation(move.strategy), HOPE)
            likely = self._knowledge.bound(move, self._incumbent) * hope
            for lost, others in [(0.0, []), *self._lighter(move.strategy)]:
                beside = self._space.combine(self._incumbent, others)
                candidate = self.fresh([*others, move])
                if beside is None or candidate is None or lost >= likely:
                    continue
                if self._knowledge.expected_memory_bytes(beside) < limit:
                    given_up = f", instead of {others[0].strategy} as it is" if others else ""
                    reason = f"ran out of memory before; there is room now{given_up}"
                    found.append(self._proposal(candidate, [*others, move], reason, likely - lost, likely))
        return found

    def _lighter(self, kept: str) -> list[tuple[float, list[Move]]]:
        """Changes of the incumbent that need less memory, with the logarithm of the rate that they lose."""
        found = []
        for name in sorted(self._incumbent.choices.keys() - {kept}):
            tried = [m for m in self._space.moves if m.strategy == name and self._knowledge.was_tried(m)]
            for other in (*tried, Move(strategy=name, choice={})):
                candidate = self._space.combine(self._incumbent, [other])
                if candidate is not None and self._knowledge.needs_less_memory(candidate, self._incumbent):
                    lost = -self._knowledge.difference(candidate, self._incumbent).mean
                    found.append((lost, [other]))
        return found

    # --- several at once ----------------------------------------------------------------------

    def recipe(self, finding: Finding) -> Proposal | None:
        """The first good choice of every strategy that usually cures what was found, at once.

        With them go the strategies that share a resource with one of them.
        """
        cures = [name for name in finding.strategies if self._cures(name)]
        partners = {name for row in TOGETHER if set(row.strategies) & set(cures) for name in row.strategies}
        moves: list[Move] = []
        for name in finding.strategies:
            first = self._first_good(name) if name in cures or name in partners else None
            if first is None or name in self._incumbent.choices or self._expensive(first):
                continue
            if self._space.combine(self._incumbent, [*moves, first]) is not None:
                moves.append(first)
        candidate = self.fresh(moves)
        if len(moves) < 2 or candidate is None:
            return None
        return self._proposal(candidate, moves, f"for the finding: {finding.message}", 0.0, self._joint_bound(moves))

    def sharing_pairs(self) -> list[Proposal]:
        """Choices of strategies that share a resource, set at once: what was chosen for one, with all of the other."""
        found = []
        for row in TOGETHER:
            first, second = (self._taken_or_first(name) for name in row.strategies)
            for pair in ((m, n) for m in first for n in second):
                candidate = self.fresh(pair)
                bound = self._joint_bound(pair)
                if candidate is not None and bound > self._threshold:
                    found.append(self._proposal(candidate, pair, row.reason, bound, bound))
        return found

    def _taken_or_first(self, name: str, count: int = 2) -> list[Move]:
        if name in self._incumbent.choices:
            return [Move(strategy=name, choice=self._incumbent.choices[name])]
        return [move for move in self._space.moves if move.strategy == name][:count]

    def _neutral_groups(self) -> list[Proposal]:
        """At most one group of choices without gain of their own, of which many pairs never met.

        What the incumbent has is an alternative to replacing it: it may be what the others need.
        """
        run = [results[0].candidate for results in self._knowledge.results.values()]
        neutral = self._neutral_moves()
        names = {move.strategy for move in neutral}
        kept = [move for move in self._incumbent.moves if move.strategy in names]
        group = covering_group([*neutral, *kept], run, random.Random(self._seed + self._knowledge.num_trials))
        moves = [move for move in group if move not in kept]
        candidate = self.fresh(moves)
        bound = self._joint_bound(moves)
        if len(moves) < MIN_GROUP or candidate is None or bound <= self._threshold:
            return []
        expected = bound * USUAL_INTERACTION * 0.7**self._groups_tried
        reason = "no gain alone; do some of them pay in company?"
        return [self._proposal(candidate, moves, reason, expected, bound)]

    def _neutral_moves(self) -> list[Move]:
        """Cheap choices that were tried alone without gain and without harm."""
        neutral = []
        for move in self._space.moves:
            verdict = self._knowledge.verdicts.get(move.key)
            alone = self._space.combine(self._incumbent, [move])
            if verdict not in ("no_gain", "inconclusive") or self._expensive(move) or alone is None:
                continue
            if self._knowledge.difference(alone, self._incumbent).mean > HARMFUL:
                neutral.append(move)
        return neutral

    # --- again, and less ----------------------------------------------------------------------

    def may_be_better(self) -> Proposal | None:
        """The single change or removal, tried before, that one more start is expected to help most."""
        removals = [Move(strategy=name, choice={}) for name in self._incumbent.choices]
        found = []
        for move in (*removals, *self._space.moves):
            candidate = self._space.combine(self._incumbent, [move])
            if candidate is None or candidate in (self._incumbent, self._knowledge.reference):
                continue
            if self._knowledge.failed(candidate) or self._knowledge.had_no_effect(candidate):
                continue
            if move.choice and not self._knowledge.was_tried(move):
                continue
            if not self._knowledge.was_run(candidate) and self._knowledge.known_to_fail(candidate):
                continue
            margin = WORTHWHILE if move.choice else -WORTHWHILE
            difference = self._knowledge.difference(candidate, self._incumbent)
            starts = len(self._knowledge.results.get(candidate.key, []))
            if difference.probability_above(margin) > UNLIKELY and starts < MAX_STARTS and self._affordable(candidate):
                reason = "may still be better by all trials so far" if move.choice else f"is it needed? {move.strategy}"
                expected = difference.expected_improvement - margin
                found.append(
                    Proposal(candidate=candidate, moves=(move,), reason=reason, score=expected, simpler=not move.choice)
                )
        return max(found, key=lambda proposal: proposal.score, default=None)

    def without(self, moves: Sequence[Move]) -> Proposal | None:
        """The incumbent without those of these moves that it still has."""
        kept = [move for move in moves if self._incumbent.choices.get(move.strategy) == move.choice]
        removal = [Move(strategy=move.strategy, choice={}) for move in kept]
        candidate = self.fresh(removal)
        if not kept or candidate is None or candidate == self._knowledge.reference:
            return None
        label = ", ".join(move.label for move in kept)
        return Proposal(candidate=candidate, moves=tuple(removal), reason=f"is it needed? {label}", simpler=True)

    def excluded_by_bound(self) -> list[Proposal]:
        """Untried single choices whose bound is below the noise."""
        found = []
        for move, bound in self._knowledge.untried(self._incumbent):
            candidate = self.fresh([move])
            if bound <= self._threshold and candidate is not None and not self._expensive(move):
                reason = "left out by its bound: does the bound hold?"
                found.append(self._proposal(candidate, [move], reason, bound, bound))
        return found

    # --- pieces -------------------------------------------------------------------------------

    def fresh(self, moves: Iterable[Move]) -> Candidate | None:
        """The incumbent with these moves, where that is legal, was never run, can be afforded and may work."""
        candidate = self._space.combine(self._incumbent, moves)
        if candidate is None or candidate == self._incumbent or self._knowledge.was_run(candidate):
            return None
        if self._knowledge.known_to_fail(candidate):
            return None
        return candidate if self._affordable(candidate) else None

    def _affordable(self, candidate: Candidate) -> bool:
        return self._knowledge.expected_cost_s(candidate, self._incumbent) <= self._left_s

    def _proposal(
        self, candidate: Candidate, moves: Iterable[Move], reason: str, expected: float, bound: float
    ) -> Proposal:
        cost = max(1.0, self._knowledge.expected_cost_s(candidate, self._incumbent))
        return Proposal(
            candidate=candidate,
            moves=tuple(moves),
            reason=reason,
            expected=expected,
            score=expected / math.sqrt(cost),
            bound=bound,
        )

    def _joint_bound(self, moves: Iterable[Move]) -> float:
        return self._knowledge.joint_bound(moves, self._incumbent)

    def _realisation(self, name: str) -> float:
        return self._priors.realisation.get(name, self._space.strategy(name).likely_part(self._space.workload))

    def _likely_part(self, name: str) -> float:
        """Part of its bound that a single choice is expected to realise on the incumbent."""
        usual = self._realisation(name)
        if name not in self._incumbent.choices:
            return usual
        exchange = self._space.strategy(name).exchange_realisation
        return (1 + usual) / 2 if exchange is None else exchange

    def _expected(self, move: Move, bound: float) -> float:
        """What a single choice is expected to save on the incumbent."""
        situation = self._knowledge.situation(self._incumbent)
        strategy = self._space.strategy(move.strategy)
        known = (
            strategy.expected(situation, strategy.complete(move.choice, self._space.workload)) if situation else None
        )
        if known is None:
            return bound * self._likely_part(move.strategy)
        if move.strategy in self._incumbent.choices:  # what was learned is of first choices
            return min(known, bound)
        learned = self._realisation(move.strategy) / strategy.likely_part(self._space.workload)
        return min(known * learned, bound)

    def _cures(self, name: str) -> bool:
        """Whether a strategy of this space usually realises much of its bound, or its first good choice here, by what
        it is expected to save beyond the noise.
        """
        if all(strategy.name != name for strategy in self._space.strategies):
            return False
        if self._realisation(name) >= CURE:
            return True
        first = self._first_good(name)
        if first is None:
            return False
        least = max(self._threshold, CURE * self._knowledge.bound(first, self._incumbent))
        return self._promise(first) > least

    def _first_good(self, name: str) -> Move | None:
        """The first choice of a strategy that could save more than the noise."""
        legal = (move for move in self._space.moves if move.strategy == name)
        return next((m for m in legal if self._knowledge.bound(m, self._incumbent) > self._threshold), None)

    def _expensive(self, move: Move) -> bool:
        return self._space.strategy(move.strategy).cost_s(move.choice, self._space.workload) > EXPENSIVE_S
