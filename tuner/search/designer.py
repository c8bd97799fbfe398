"""Which candidate next: the order of a search, written as one story.

The designer is a pure function of the space, the settings and the results in order: it reads no
clock, no file and no global state, so a search can be replayed, resumed and run against recorded
tables. Stages:

1. `baseline`   restarts of the user's own configuration: the noise of this machine
2. `past`       what won for similar workloads on such hardware
3. `recipe`     the choices that the diagnosed bottleneck calls for, together; then each left out
4. `move`       single choices on the incumbent, by what they may gain for their cost; a better one
                becomes the incumbent and its breakdown gives new bounds
5. `together`   choices that share a resource; then groups of choices that brought nothing alone, built
                so that every pair meets, to find what pays only in company
6. `sampler`    Optuna's TPE for what is left
7. `audit`      a few choices that were left out by their bound, to see whether bounds hold

A change is accepted when it is better with a probability of 95 % by all trials so far (see
`effects.py`); a likely one is run again until that is clear. The search ends when no bound is above
the noise, or the budget is spent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Sequence

from tuner.profiling.bounds import Situation
from tuner.profiling.diagnosis import diagnose
from tuner.records import (
    BASELINE,
    Candidate,
    Certificate,
    Decision,
    FailureKind,
    Finding,
    Move,
    Purpose,
    Suggestion,
    TrialResult,
)
from tuner.search.effects import Difference
from tuner.search.groups import covering_group
from tuner.search.knowledge import WORTHWHILE, Knowledge, Outcome, Priors, move_key
from tuner.search.sampler import suggest_candidates
from tuner.search.space import Space
from tuner.strategies.composition import TOGETHER

BASELINE_STARTS = 4
MAX_STARTS = 2
"""Times that one candidate is run before its verdict is left open."""
SURE = 0.95
UNLIKELY = 0.15
LIKELY = 0.7
"""Probability of a worthwhile gain from which a candidate is run again."""
HARMFUL = -0.06
"""Choices that seemed worse than this alone are not tried in company."""
EXPENSIVE_S = 20.0
MAX_AUDITS = 2
ENOUGH_AUDITS = 20
SENTINEL_EVERY = 4
USUAL_REALISATION = 0.5
"""Part of a bound that a choice realises, before any was seen to."""
USUAL_INTERACTION = 0.15
"""Part of a joint bound that choices without a gain of their own realise in company."""
MIN_GROUP = 3

Story = Generator[Suggestion, Outcome, None]
Trying = Generator[Suggestion, Outcome, str]


class Designer:
    """Suggests trials and takes in their outcomes.

    Args:
        reference: The configuration that gains are measured against: the user's own, or the nearest
            feasible one where that does not fit into memory.
        budget_s: Seconds of trials that the search may spend.
        max_trials: Suggestions that the search may make.
    """

    def __init__(
        self,
        space: Space,
        *,
        budget_s: float,
        max_trials: int,
        seed: int = 0,
        priors: Priors | None = None,
        reference: Candidate = BASELINE,
    ) -> None:
        self.space = space
        self.knowledge = Knowledge(space, reference)
        self.incumbent = reference
        self.decisions: list[Decision] = []
        self.findings: tuple[Finding, ...] = ()
        self.ended = "interrupted"
        self.failed: TrialResult | None = None
        self._budget_s = budget_s
        self._max_trials = max_trials
        self._seed = seed
        self._random = random.Random(seed)
        self._priors = priors or Priors()
        self._audits = self._violations = self._groups_tried = 0
        self._unproven_groups: list[Sequence[Move]] = []
        self._story = self._tell()
        self._next: Suggestion | None = None
        self._advance(None)

    # --- the interface ------------------------------------------------------------------------

    @property
    def reference(self) -> Candidate:
        return self.knowledge.reference

    def suggest(self) -> Suggestion | None:
        """The next trial, or None when the search has ended. Does not change anything."""
        return self._next

    def update(self, outcome: Outcome) -> None:
        """Takes in what came of the suggestion."""
        assert self._next is not None, "the search has ended"
        self.knowledge.take_in(outcome, self._next.companion)
        self._advance(outcome)

    def best(self) -> Candidate:
        """What the search would recommend without a confirmation."""
        return next(iter(self.finalists(1)), self.reference)

    def finalists(self, count: int) -> list[Candidate]:
        """The incumbent and others that may well be better, the highest expected gain first; the incumbent
        gives way only to what is likely to be better by more than a little."""
        contenders = []
        for candidate in self.knowledge.measured():
            difference = self.knowledge.difference(candidate, self.incumbent)
            if candidate != self.incumbent and difference.probability_above(WORTHWHILE) > UNLIKELY:
                contenders.append((difference.probability_above(WORTHWHILE), candidate))
        if self.incumbent != self.reference:
            contenders.append((LIKELY, self.incumbent))
        contenders.sort(key=lambda pair: -pair[0])
        return [candidate for _, candidate in contenders][:count]

    def certificate(self) -> Certificate:
        """What is known about everything that was not tried."""
        audits = self._priors.audits + self._audits
        return Certificate(
            remaining_bound=max((bound for _, bound in self.knowledge.untried(self.incumbent)), default=0.0),
            status="audited" if audits >= ENOUGH_AUDITS else "estimated",
            noise=self.knowledge.noise,
            ended=self.ended,
            not_tried=tuple(decision for decision in self.decisions if decision.verdict == "not_tried"),
            audits=audits,
            audit_violations=self._priors.audit_violations + self._violations,
        )

    # --- the story ----------------------------------------------------------------------------

    def _tell(self) -> Story:
        yield from self._baseline()
        if self.failed is not None:
            self.ended = "the reference could not be measured"
            return
        yield from self._past()
        yield from self._recipes()
        yield from self._moves()
        yield from self._sharing_pairs()
        yield from self._groups()
        yield from self._refine()
        yield from self._simplify()
        yield from self._sampler()
        yield from self._audit()
        self._conclude()

    def _baseline(self) -> Story:
        for start in range(BASELINE_STARTS):
            outcome = yield Suggestion(
                candidate=self.reference,
                purpose=Purpose.BASELINE,
                stage="baseline",
                reason="the configuration that gains are measured against; restarts show the noise",
                replicate=start,
                companion=self.reference,
            )
            if not outcome.result.ok:
                self.failed = outcome.result
                self._record("baseline", "failed", why_not(outcome.result), self.reference, outcomes=[outcome])
                return
        situation = self._situation()
        self.findings = diagnose(situation) if situation else ()
        self._record("baseline", "measured", f"{BASELINE_STARTS} starts", self.reference)

    def _past(self) -> Story:
        for winner in self._priors.past_winners:
            wanted = {move_key(Move(strategy=s, choice=c)) for s, c in winner.choices.items()}
            moves = [move for move in self.space.moves if move_key(move) in wanted]
            candidate = self._combined(moves)
            if candidate is not None:
                verdict = yield from self._try(candidate, moves, "past", "won for a similar workload on such hardware")
                if verdict == "accepted":
                    yield from self._leave_out(moves)

    def _recipes(self) -> Story:
        """For each serious finding, the first good choice of every strategy that it calls for, at once."""
        for finding in self.findings:
            situation = self._situation()
            if situation is None or finding.severity == "note":
                continue
            moves = self._recipe_moves(finding, situation)
            candidate = self._combined(moves)
            if len(moves) < 2 or candidate is None:
                continue
            verdict = yield from self._try(candidate, moves, "recipe", f"for the finding: {finding.message}")
            if verdict == "accepted":
                yield from self._leave_out(moves)

    def _recipe_moves(self, finding: Finding, situation: Situation) -> list[Move]:
        moves: list[Move] = []
        for name in finding.strategies:
            legal = [move for move in self.space.moves if move.strategy == name]
            if not legal or name in self.incumbent.choices or self.space.strategy(name).trial_cost_s > EXPENSIVE_S:
                continue
            good = next((m for m in legal if self.space.bound(m, situation) > self.knowledge.threshold), None)
            if good is not None and self.space.combine(self.incumbent, [*moves, good]) is not None:
                moves.append(good)
        return moves

    def _moves(self) -> Story:
        """Single moves by score; a group of neutral ones when that promises more than the next move."""
        while ranked := self._ranked_moves():
            score, move, candidate, bound = ranked[0]
            group = self._group()
            if group and self._group_score(group) > score:
                yield from self._try_group(group)
                continue
            reason = f"could save at most {bound:.0%} of the step"
            verdict = yield from self._try(candidate, [move], "move", reason, bound=bound)
            self.knowledge.verdicts[move_key(move)] = verdict

    def _ranked_moves(self) -> list[tuple[float, Move, Candidate, float]]:
        """Affordable untried single moves whose bound is above the noise, the best value first."""
        ranked = []
        for move in self.space.moves:
            candidate = self._combined([move])
            if candidate is None or move_key(move) in self.knowledge.verdicts or not self._affordable(candidate):
                continue
            bound = self.knowledge.bound(move, self.incumbent)
            if bound > self.knowledge.threshold:
                likely = self._priors.realisation.get(move.strategy, USUAL_REALISATION)
                if move.strategy in self.incumbent.choices:
                    likely = (1 + likely) / 2  # what one choice began, another may finish
                discouraged = 0.5 ** self.knowledge.failures(move.strategy)
                cost = max(1.0, self.knowledge.expected_cost_s(candidate, self.incumbent))
                ranked.append((bound * likely * discouraged / math.sqrt(cost), move, candidate, bound))
        return sorted(ranked, key=lambda item: -item[0])

    def _sharing_pairs(self) -> Story:
        """Choices of strategies that share a resource, set at once."""
        for row in TOGETHER:
            if not set(row.strategies) <= {move.strategy for move in self.space.moves}:
                continue
            taken = [Move(strategy=s, choice=c) for s, c in self.incumbent.choices.items()]
            first, second = (
                [m for m in taken if m.strategy == name] or self._first_moves(name) for name in row.strategies
            )
            for pair in ((m, n) for m in first for n in second):
                candidate = self._combined(pair)
                bound = self._joint_bound(pair)
                if candidate is None or bound <= self.knowledge.threshold:
                    continue
                verdict = yield from self._try(candidate, pair, "together", row.reason, bound=bound)
                if verdict == "accepted":
                    yield from self._leave_out(pair)
                    break

    def _first_moves(self, name: str, count: int = 2) -> list[Move]:
        return [move for move in self.space.moves if move.strategy == name][:count]

    def _groups(self) -> Story:
        """Groups of choices that brought nothing alone, until every pair has met or nothing is left to gain."""
        while group := self._group():
            yield from self._try_group(group)

    def _group(self) -> list[Move]:
        """Neutral choices of which many pairs never met; empty where none is left, or too little to gain."""
        run = [results[0].candidate for results in self.knowledge.results.values()]
        moves = covering_group(self._neutral_moves(), run, random.Random(self._seed + self.knowledge.num_trials))
        candidate = self._combined(moves)
        if len(moves) < MIN_GROUP or candidate is None or not self._affordable(candidate):
            return []
        return moves if self._joint_bound(moves) > self.knowledge.threshold else []

    def _joint_bound(self, moves: Iterable[Move]) -> float:
        """No more than the sum of the bounds of the categories that the moves share."""
        return min(1.0, sum(self.knowledge.bound(move, self.incumbent) for move in moves))

    def _group_score(self, moves: Sequence[Move]) -> float:
        candidate = self.space.combine(self.incumbent, moves)
        assert candidate is not None
        cost = max(1.0, self.knowledge.expected_cost_s(candidate, self.incumbent))
        return self._joint_bound(moves) * USUAL_INTERACTION * 0.7**self._groups_tried / math.sqrt(cost)

    def _try_group(self, moves: Sequence[Move]) -> Story:
        candidate = self._combined(moves)
        if candidate is not None:
            self._groups_tried += 1
            reason = "no gain alone; do some of them pay in company?"
            verdict = yield from self._try(candidate, moves, "together", reason, bound=self._joint_bound(moves))
            if verdict == "accepted":
                self._unproven_groups.append(moves)

    def _neutral_moves(self) -> list[Move]:
        """Cheap choices that were tried alone without gain and without harm."""
        neutral = []
        for move in self.space.moves:
            verdict = self.knowledge.verdicts.get(move_key(move))
            if verdict not in ("no_gain", "inconclusive"):
                continue
            if self.space.strategy(move.strategy).trial_cost_s > EXPENSIVE_S:
                continue
            alone = self.space.combine(self.incumbent, [move])
            if alone is not None and self.knowledge.difference(alone, self.incumbent).mean > HARMFUL:
                neutral.append(move)
        return neutral

    def _refine(self) -> Story:
        """Runs again, or for the first time on this incumbent, what may still be better by all trials so far."""
        while ranked := self._may_be_better():
            _, move, candidate = max(ranked, key=lambda item: item[0])
            reason = "may still be better by all trials so far" if move.choice else f"is it needed? {move.strategy}"
            yield from self._try(candidate, [move], "refine", reason, simpler=not move.choice)

    def _may_be_better(self) -> list[tuple[float, Move, Candidate]]:
        """Single changes and removals that were tried before, with what is expected of one more start."""
        ranked = []
        removals = [Move(strategy=name, choice={}) for name in self.incumbent.choices]
        for move in (*removals, *self.space.moves):
            candidate = self.space.combine(self.incumbent, [move])
            if candidate in (None, self.incumbent, self.reference) or not self._affordable(candidate):
                continue
            if self.knowledge.failed(candidate) or (move.choice and not self.knowledge.was_tried(move)):
                continue
            margin = WORTHWHILE if move.choice else -WORTHWHILE
            difference = self.knowledge.difference(candidate, self.incumbent)
            if difference.probability_above(margin) > UNLIKELY and self._starts(candidate) < MAX_STARTS:
                ranked.append((difference.expected_improvement - margin, move, candidate))
        return ranked

    def _starts(self, candidate: Candidate) -> int:
        return len(self.knowledge.results.get(candidate.key, []))

    def _sampler(self) -> Story:
        worth = [m for m in self.space.moves if self.knowledge.bound(m, self.incumbent) > self.knowledge.threshold]
        if len({move.strategy for move in worth}) < 2:
            return
        while True:
            suggested = suggest_candidates(
                self.space,
                worth,
                self.knowledge.told(),
                seed=self._seed + self.knowledge.num_trials,
                known=set(self.knowledge.results),
            )
            candidate = next((c for c in suggested if self._affordable(c)), None)
            if candidate is None:
                return
            moves = [Move(strategy=s, choice=c) for s, c in candidate.choices.items()]
            verdict = yield from self._try(candidate, moves, "sampler", "suggested by TPE from all trials so far")
            if verdict == "accepted":
                yield from self._leave_out(moves)

    def _audit(self) -> Story:
        """Runs a few choices that their bound excluded: does the bound hold?"""
        excluded = [
            (move, bound)
            for move, bound in self.knowledge.untried(self.incumbent)
            if bound <= self.knowledge.threshold and self.space.strategy(move.strategy).trial_cost_s <= EXPENSIVE_S
        ]
        self._random.shuffle(excluded)
        for move, bound in excluded[:MAX_AUDITS]:
            candidate, incumbent = self._combined([move]), self.incumbent
            if candidate is None:
                continue
            reason = "left out by its bound: does the bound hold?"
            verdict = yield from self._try(candidate, [move], "audit", reason, bound=bound)
            if verdict in ("accepted", "no_gain", "inconclusive"):
                gain = self.knowledge.difference(candidate, incumbent)
                self._audits += 1
                self._violations += gain.mean - 2 * gain.sd > -math.log(max(1e-9, 1 - bound))

    # --- simplifying --------------------------------------------------------------------------

    def _leave_out(self, moves: Sequence[Move]) -> Story:
        """After several changes were accepted at once: each one's own gain, and out with what has none."""
        if len(moves) > 1:
            for move in moves:
                yield from self._without([move])

    def _simplify(self) -> Story:
        """Of groups that paid, what is not needed goes."""
        while self._unproven_groups:
            yield from self._halve(self._unproven_groups.pop(0))

    def _halve(self, moves: Sequence[Move]) -> Story:
        """Leaves out halves, then quarters, of a group that pays, until all that remains is needed."""
        pending = [list(moves[: len(moves) // 2]), list(moves[len(moves) // 2 :])]
        while pending:
            part = pending.pop(0)
            verdict = yield from self._without(part)
            if verdict not in ("accepted", "unaffordable") and len(part) > 1:
                pending += [part[: len(part) // 2], part[len(part) // 2 :]]

    def _without(self, moves: Sequence[Move]) -> Trying:
        kept = [move for move in moves if self.incumbent.choices.get(move.strategy) == move.choice]
        removal = [Move(strategy=move.strategy, choice={}) for move in kept]
        candidate = self._combined(removal)
        if not kept or candidate is None or candidate == self.reference:
            return "unaffordable"
        label = ", ".join(move.label for move in kept)
        return (yield from self._try(candidate, removal, "simplify", f"is it needed? {label}", simpler=True))

    # --- one candidate ------------------------------------------------------------------------

    def _try(
        self,
        candidate: Candidate,
        moves: Iterable[Move],
        stage: str,
        reason: str,
        *,
        bound: float | None = None,
        simpler: bool = False,
    ) -> Trying:
        """Runs a candidate as often as it takes, judges it, and records the decision.

        A `simpler` candidate (something left out) is accepted when it is about as good.
        """
        if not self._affordable(candidate):
            return "unaffordable"
        yield from self._sentinel()
        if not self._affordable(candidate):
            return "unaffordable"
        incumbent = self.incumbent
        outcomes: list[Outcome] = []
        verdict = "inconclusive"
        while (
            verdict == "inconclusive" and len(outcomes) < MAX_STARTS and (not outcomes or self._affordable(candidate))
        ):
            outcome = yield Suggestion(
                candidate=candidate,
                purpose=_purpose(stage, len(outcomes)),
                stage=stage,
                reason=reason,
                moves=tuple(moves),
                bound=bound,
                replicate=len(outcomes),
                companion=incumbent,
            )
            outcomes.append(outcome)
            verdict = self._judge(outcome.result, candidate, incumbent, simpler)
        measured = outcomes[-1].result.ok
        difference = self.knowledge.difference(candidate, incumbent) if measured else None
        if verdict == "accepted":
            self.incumbent = candidate
        why = reason if measured else f"{reason}; {why_not(outcomes[-1].result)}"
        self._record(stage, verdict, why, candidate, moves, outcomes, bound, difference)
        return verdict

    def _judge(self, result: TrialResult, candidate: Candidate, incumbent: Candidate, simpler: bool) -> str:
        if not result.ok:
            numerics = result.failure is None or result.failure.kind is FailureKind.NUMERICS
            return "guard_rejected" if numerics and result.guard is not None else "failed"
        if any(not effect.took and effect.strategy in candidate.choices for effect in result.effects):
            return "no_effect"
        difference = self.knowledge.difference(candidate, incumbent)
        if simpler:
            if difference.probability_above(-WORTHWHILE) > 0.5:
                return "accepted"
            return "no_gain" if difference.probability_above(0) < 1 - LIKELY else "inconclusive"
        if difference.probability_above(0) >= SURE:
            return "accepted"
        return "inconclusive" if difference.probability_above(WORTHWHILE) >= LIKELY else "no_gain"

    def _sentinel(self) -> Story:
        """Where nothing runs in turns, the incumbent is run again now and then: has the machine drifted?"""
        patience = SENTINEL_EVERY if self.knowledge.drifts else 2 * SENTINEL_EVERY
        if self.knowledge.unpaired_since_sentinel >= patience and self._affordable(self.incumbent):
            self.knowledge.unpaired_since_sentinel = 0
            yield Suggestion(
                candidate=self.incumbent,
                purpose=Purpose.SENTINEL,
                stage="sentinel",
                reason="the incumbent again, to see drift",
                replicate=len(self.knowledge.results.get(self.incumbent.key, [])),
            )
            self.knowledge.unpaired_since_sentinel = 0

    def _combined(self, moves: Iterable[Move]) -> Candidate | None:
        """The incumbent with these moves, where that is legal, new, and something else than the incumbent."""
        candidate = self.space.combine(self.incumbent, moves)
        if candidate is None or candidate == self.incumbent or self.knowledge.was_run(candidate):
            return None
        return candidate

    def _affordable(self, candidate: Candidate) -> bool:
        left_s = self._budget_s - self.knowledge.spent_s
        within = self.knowledge.expected_cost_s(candidate, self.incumbent) <= left_s
        return within and self.knowledge.num_trials < self._max_trials

    def _situation(self) -> Situation | None:
        return self.knowledge.situation(self.incumbent)

    # --- the record ---------------------------------------------------------------------------

    def _record(
        self,
        stage: str,
        verdict: str,
        reason: str,
        candidate: Candidate | None = None,
        moves: Iterable[Move] = (),
        outcomes: Sequence[Outcome] = (),
        bound: float | None = None,
        difference: Difference | None = None,
    ) -> None:
        self.decisions.append(
            Decision(
                sequence=len(self.decisions) + 1,
                stage=stage,
                verdict=verdict,
                reason=reason,
                candidate=candidate,
                moves=tuple(moves),
                trial_ids=tuple(outcome.result.trial_id for outcome in outcomes),
                predicted_bound=bound,
                measured_gain=None if difference is None else difference.ratio - 1,
                measured_se=None if difference is None else difference.sd,
            )
        )

    def _conclude(self) -> None:
        """Writes down everything that was not tried, and why the search ended."""
        left = 0
        for move, bound in self.knowledge.untried(self.incumbent):
            above = bound > self.knowledge.threshold
            left += above
            why = "the budget was spent" if above else f"could save at most {bound:.1%} of the step: below the noise"
            self._record("end", "not_tried", why, moves=[move], bound=bound)
        for exclusion in self.space.excluded:
            self._record("end", "not_tried", exclusion.reason, moves=[exclusion.move])
        self.ended = "budget spent" if left else "no bound above noise"

    def _advance(self, outcome: Outcome | None) -> None:
        try:
            self._next = next(self._story) if outcome is None else self._story.send(outcome)
        except StopIteration:
            self._next = None


def why_not(result: TrialResult) -> str:
    """Why a result does not count."""
    if result.failure is not None:
        return f"{result.failure.kind.value} in {result.failure.phase.value}: {result.failure.message}"
    if result.guard is not None and not result.guard.passed:
        return result.guard.reason
    return "no clean window could be measured"


def _purpose(stage: str, number: int) -> Purpose:
    if number:
        return Purpose.REPLICATE
    return Purpose.AUDIT if stage == "audit" else Purpose.EXPLORE
