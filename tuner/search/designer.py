"""Which candidate next: the order of a search, written as one story.

The designer is a pure function of the space, the settings and the results in order: it reads no
clock, no file and no global state, so a search can be replayed, resumed and run against recorded
tables. Stages:

1. `baseline`   restarts of the user's own configuration: the noise of this machine
2. `past`       what won for similar workloads on such hardware
3. `recipe`     the choices that the diagnosed bottleneck calls for, together
4. `move`       on the incumbent, whatever promises most for its cost: a single choice by its bound; a
                choice that ran out of memory, in exchange for one that gains less; a group of choices
                that brought nothing alone, built so that many pairs meet. What is better becomes the
                incumbent, and its breakdown gives new bounds
5. `together`   choices of strategies that share a resource
6. `refine`     again, what may still be better by all trials; `simplify` leaves out what is not needed
7. `sampler`    Optuna's TPE for what is left
8. `audit`      a few choices that were left out by their bound, to see whether bounds hold

A change is accepted when it is better with a probability of 95 % by all trials so far (see
`effects.py`); a likely one is run again until that is clear. The search ends when no bound is above
the noise, or the budget is spent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Sequence

from steptune.tuner.profiling.diagnosis import Evidence, diagnose
from steptune.tuner.records import (
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
from steptune.tuner.search.confirmation import LEAST_BLOCKS, LONGEST_OVERRUN
from steptune.tuner.search.effects import Difference
from steptune.tuner.search.knowledge import WORTHWHILE, Knowledge, Outcome, Priors, without_effect
from steptune.tuner.search.proposals import MAX_STARTS, UNLIKELY, Proposal, Proposals
from steptune.tuner.search.sampler import suggest_candidates
from steptune.tuner.search.space import Space

MAX_BASELINE_STARTS, MIN_BASELINE_STARTS = 4, 2
BASELINE_SHARE = 0.06
"""Of the budget after which the baseline is not started once more."""
SECOND_SHARE = 0.15
"""Of the time left that the second start of the baseline may take; without it, noise is what it usually is."""
LEAST_RESERVE, LARGEST_RESERVE = 0.12, 0.38
"""Of the budget that is kept for the confirmation."""
RESERVE_MARGIN = 1.1
WINDOW_S = 1.2
"""Of a start of the confirmation, beside the start itself."""
SURE = 0.95
CLEARLY = 0.9
EVEN = 0.5
LIKELY = 0.7
"""Probability of a worthwhile gain from which a candidate is run again."""
NEEDED_CANDIDATES = 3
"""Candidates that a search should have time to try."""
BUDGET_SPENT, INTERRUPTED, NOTHING_LEFT = "budget spent", "interrupted", "no bound above noise"
"""Why a search ended."""
MAX_AUDITS = 2
ENOUGH_AUDITS = 20
SENTINEL_EVERY = 4

Story = Generator[Suggestion, Outcome, None]
Trying = Generator[Suggestion, Outcome, str]


class Designer:
    """Suggests trials and takes in their outcomes.

    Args:
        reference: The configuration that gains are measured against: the user's own, or the nearest
            feasible one where that does not fit into memory.
        budget_s: Seconds of trials that the search and the confirmation may spend.
        confirm_blocks: Blocks of the confirmation, for which a part of the budget is kept; 0 keeps nothing.
        max_trials: Suggestions that the search may make.
        ran_out: Trials of configurations nearer to today's that ran out of memory.
    """

    def __init__(
        self,
        space: Space,
        *,
        budget_s: float,
        max_trials: int,
        confirm_blocks: int = 0,
        seed: int = 0,
        priors: Priors | None = None,
        reference: Candidate = BASELINE,
        ran_out: Sequence[TrialResult] = (),
    ) -> None:
        self.space = space
        self.knowledge = Knowledge(space, reference)
        self.incumbent = reference
        self.decisions: list[Decision] = []
        self.findings: tuple[Finding, ...] = ()
        self.ended = INTERRUPTED
        self.failed: TrialResult | None = None
        self.budget_s = budget_s
        self._max_trials = max_trials
        self._confirm_blocks = confirm_blocks
        self._seed = seed
        self._priors = priors or Priors()
        self._audits = self._violations = self._groups_tried = self._num_left_out = 0
        self._unproven_groups: list[tuple[Move, ...]] = []
        self._ran_out = tuple(ran_out)
        for result in self._ran_out[:1]:
            self.knowledge.take_in_beside(result)
        # That others ran out of memory in today's precision is no hint to try them in exchange for something.
        self.knowledge.spent_s += sum(result.duration_ns for result in self._ran_out[1:]) / 1e9
        self._story = self._tell()
        self._next: Suggestion | None = None
        self._advance(None)

    # --- the interface ------------------------------------------------------------------------

    @property
    def reference(self) -> Candidate:
        return self.knowledge.reference

    def baseline_results(self) -> list[TrialResult]:
        """The good ones of the reference."""
        return [result for result in self.knowledge.results.get(self.reference.key, []) if result.ok]

    def suggest(self) -> Suggestion | None:
        """The next trial, or None when the search has ended. Does not change anything."""
        return self._next

    def update(self, outcome: Outcome) -> None:
        """Takes in what came of the suggestion."""
        assert self._next is not None, "the search has ended"
        self.knowledge.take_in(outcome, self._next.companion)
        self._advance(outcome)

    def stop(self, why: str, ended: str) -> None:
        """Ends a search before its story does; what it would have tried is recorded as not tried.

        Args:
            why: Why that was not tried.
            ended: `BUDGET_SPENT` or `INTERRUPTED`.
        """
        if self._next is not None:
            self._next = None
            self._conclude(why, ended)

    def learn(self, result: TrialResult) -> None:
        """Takes in a trial that was not suggested: the story waits for the outcome of its suggestion as before."""
        self.knowledge.take_in_beside(result)

    def best(self) -> Candidate:
        """What the search would recommend without a confirmation."""
        return next(iter(self.finalists(1)), self.reference)

    def finalists(self, count: int) -> list[Candidate]:
        """The incumbent and others that may well be better than it.

        The incumbent comes first, unless another is clearly better by more than a little.
        """
        contenders = []
        for candidate in self.knowledge.measured():
            chance = self.knowledge.difference(candidate, self.incumbent).probability_above(WORTHWHILE)
            if candidate != self.incumbent and chance > UNLIKELY and not self.knowledge.had_no_effect(candidate):
                contenders.append((chance, candidate))
        if self.incumbent != self.reference:
            contenders.append((CLEARLY, self.incumbent))
        contenders.sort(key=lambda pair: -pair[0])
        return [candidate for _, candidate in contenders][:count]

    @property
    def has_searched(self) -> bool:
        """Whether a candidate was judged, or none promised a gain above the noise. One that ran out of the time that
        was left says nothing.
        """
        others = (r for results in self.knowledge.results.values() for r in results if r.candidate != self.reference)
        late = {FailureKind.TIMEOUT} if self.ended in (BUDGET_SPENT, INTERRUPTED) else set()
        return self.ended == NOTHING_LEFT or any(r.failure is None or r.failure.kind not in late for r in others)

    def no_time_for(self) -> list[str]:
        """What the search left out because its time was up, each as a phrase."""
        missed = []
        if self._num_left_out and self.ended in (BUDGET_SPENT, INTERRUPTED):
            most = max(bound for _, bound in self.knowledge.untried(self.incumbent))
            choices = "1 choice that" if self._num_left_out == 1 else f"{self._num_left_out} choices that each"
            missed.append(f"{choices} may still save up to {most:.0%} of the step")
        return missed

    def needed_s(self) -> float:
        """Seconds of trials that the baseline took and that a short search and its confirmation would take."""
        baseline_s = sum(r.duration_ns for r in self.baseline_results()) / 1e9
        promising = [
            m for m, b in self.knowledge.untried(self.incumbent) if b > self.knowledge.threshold(self.incumbent)
        ]
        moved = [c for move in promising if (c := self.space.combine(self.incumbent, [move])) is not None]
        costs_s = sorted(self.knowledge.expected_cost_s(candidate, self.incumbent) for candidate in moved)
        searching_s = sum(costs_s[:NEEDED_CANDIDATES])
        return baseline_s + searching_s + RESERVE_MARGIN * self._confirm_blocks * self._block_s()

    def certificate(self) -> Certificate:
        """What is known about everything that was not tried."""
        audits = self._priors.audits + self._audits
        return Certificate(
            remaining_bound=max((bound for _, bound in self.knowledge.untried(self.incumbent)), default=0.0),
            status="audited" if audits >= ENOUGH_AUDITS else "estimated",
            noise=self.knowledge.noise(self.incumbent),
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
        yield from self._refine()
        yield from self._simplify()
        yield from self._sampler()
        yield from self._simplify()
        yield from self._audit()
        spent = "trials" if self.knowledge.num_trials >= self._max_trials else "budget"
        self._conclude(f"the {spent} {'were' if spent == 'trials' else 'was'} spent", f"{spent} spent")

    def _baseline(self) -> Story:
        for result in self._ran_out:
            outcome = Outcome(result=result)
            self._record("baseline", "failed", why_not(result), result.candidate, outcomes=[outcome])
        starts = number = 0
        while self._wants_baseline(starts):
            outcome = yield Suggestion(
                candidate=self.reference,
                purpose=Purpose.BASELINE,
                stage="baseline",
                reason="the configuration that gains are measured against; restarts show the noise",
                replicate=number,
                companion=self.reference if number else None,  # what a start costs is not known before the first
            )
            number += 1
            starts += 2 if outcome.companion is not None and outcome.companion.ok else 1
            if not outcome.result.ok:
                self.failed = outcome.result
                self._record("baseline", "failed", why_not(outcome.result), self.reference, outcomes=[outcome])
                return
        situation = self.knowledge.situation(self.reference)
        self.findings = diagnose(Evidence(situation=situation)) if situation else ()
        self._record("baseline", "measured", f"{starts} starts", self.reference)

    def _wants_baseline(self, starts: int) -> bool:
        if starts == 0:
            return True
        if starts < MIN_BASELINE_STARTS:
            left_s = self.budget_s - self.knowledge.spent_s
            return self.knowledge.expected_cost_s(self.reference, self.reference) <= SECOND_SHARE * left_s
        return starts < MAX_BASELINE_STARTS and self.knowledge.spent_s < BASELINE_SHARE * self.budget_s

    def _past(self) -> Story:
        for winner in self._priors.past_winners:
            wanted = {move.key for move in winner.moves}
            moves = tuple(move for move in self.space.moves if move.key in wanted)
            candidate = self._proposals().fresh(moves)
            if candidate is not None:
                reason = "won for a similar workload on such hardware"
                yield from self._try_several(Proposal(candidate=candidate, moves=moves, reason=reason), "past")

    def _recipes(self) -> Story:
        for finding in self.findings:
            proposal = self._proposals().recipe(finding) if finding.severity != "note" else None
            if proposal is not None:
                yield from self._try_several(proposal, "recipe")

    def _moves(self) -> Story:
        while (proposal := self._proposals().next_move()) is not None:
            alone = len(proposal.moves) == 1
            verdict = yield from self._try(proposal, "move" if alone else "together")
            if verdict == "unaffordable":
                return
            if alone:
                self.knowledge.verdicts[proposal.moves[0].key] = verdict
            else:
                self._groups_tried += 1
                if verdict == "accepted":
                    self._unproven_groups.append(proposal.moves)

    def _sharing_pairs(self) -> Story:
        seen: set[str] = set()
        while pairs := [p for p in self._proposals().sharing_pairs() if p.candidate.key not in seen]:
            seen.add(pairs[0].candidate.key)
            yield from self._try_several(pairs[0], "together")

    def _refine(self) -> Story:
        while (proposal := self._proposals().may_be_better()) is not None:
            if (yield from self._try(proposal, "refine")) == "unaffordable":
                return

    def _sampler(self) -> Story:
        threshold = self.knowledge.threshold(self.incumbent)
        worth = [m for m in self.space.moves if self.knowledge.bound(m, self.incumbent) > threshold]
        while len({move.strategy for move in worth}) > 1:
            suggested = suggest_candidates(
                self.space,
                worth,
                self.knowledge.told(),
                seed=self._seed + self.knowledge.num_trials,
                known=set(self.knowledge.results),
                base=self.incumbent,
            )
            likely = (c for c in suggested if not self.knowledge.known_to_fail(c))
            candidate = next((c for c in likely if self._affordable(c)), None)
            if candidate is None:
                return
            reason = "suggested by TPE from all trials so far"
            yield from self._try_several(Proposal(candidate=candidate, moves=candidate.moves, reason=reason), "sampler")

    def _audit(self) -> Story:
        """Runs a few choices that their bound excluded: does the bound hold?"""
        excluded = self._proposals().excluded_by_bound()
        random.Random(self._seed).shuffle(excluded)
        for proposal in excluded[:MAX_AUDITS]:
            incumbent = self.incumbent
            verdict = yield from self._try(proposal, "audit")
            if verdict in ("accepted", "no_gain", "inconclusive"):
                gain = self.knowledge.difference(proposal.candidate, incumbent)
                self._audits += 1
                self._violations += gain.mean - 2 * gain.sd > -math.log(max(1e-9, 1 - (proposal.bound or 0.0)))

    # --- several changes at once --------------------------------------------------------------

    def _try_several(self, proposal: Proposal, stage: str) -> Story:
        """Where several changes are accepted at once, those without a gain of their own go out in the end."""
        verdict = yield from self._try(proposal, stage)
        if verdict == "accepted" and len(proposal.moves) > 1:
            self._unproven_groups.append(proposal.moves)

    def _simplify(self) -> Story:
        """Leaves out halves, then quarters, of groups that paid, until all that remains is needed."""
        while self._unproven_groups:
            moves = self._unproven_groups.pop(0)
            pending = [moves[: len(moves) // 2], moves[len(moves) // 2 :]]
            while pending:
                part = pending.pop(0)
                verdict = yield from self._without(part)
                if verdict not in ("accepted", "unaffordable") and len(part) > 1:
                    pending += [part[: len(part) // 2], part[len(part) // 2 :]]

    def _without(self, moves: Sequence[Move]) -> Trying:
        proposal = self._proposals().without(moves)
        if proposal is None:
            return "unaffordable"
        return (yield from self._try(proposal, "simplify"))

    # --- one candidate ------------------------------------------------------------------------

    def _try(self, proposal: Proposal, stage: str) -> Trying:
        """Runs a candidate as often as it takes, judges it, and records the decision."""
        yield from self._sentinel()
        candidate, incumbent = proposal.candidate, self.incumbent
        outcomes: list[Outcome] = []
        verdict = "inconclusive"
        while verdict in ("inconclusive", "contended") and len(outcomes) < MAX_STARTS and self._affordable(candidate):
            outcome = yield Suggestion(
                candidate=candidate,
                purpose=_purpose(stage, len(outcomes)),
                stage=stage,
                reason=proposal.reason,
                moves=proposal.moves,
                bound=proposal.bound,
                replicate=len(self.knowledge.results.get(candidate.key, [])),
                companion=incumbent,
            )
            outcomes.append(outcome)
            verdict = self._judge(outcome.result, candidate, incumbent, proposal.simpler)
        if not outcomes:
            return "unaffordable"
        measured = outcomes[-1].result.ok
        difference = self.knowledge.difference(candidate, incumbent) if measured else None
        if verdict == "accepted":
            self.incumbent = candidate
        why = proposal.reason if measured else f"{proposal.reason}; {why_not(outcomes[-1].result)}"
        if verdict == "no_effect":
            why = f"{why}; {without_effect(outcomes[-1].result, candidate)}"
        self._record(stage, verdict, why, candidate, proposal.moves, outcomes, proposal.bound, difference)
        return verdict

    def _judge(self, result: TrialResult, candidate: Candidate, incumbent: Candidate, simpler: bool) -> str:
        """A `simpler` candidate (something left out) is accepted when it is about as good."""
        if not result.ok:
            if result.failure is None and result.contended:
                return "contended"
            numerics = result.failure is None or result.failure.kind is FailureKind.NUMERICS
            return "guard_rejected" if numerics and result.guard is not None else "failed"
        if without_effect(result, candidate):
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
            yield Suggestion(
                candidate=self.incumbent,
                purpose=Purpose.SENTINEL,
                stage="sentinel",
                reason="the incumbent again, to see drift",
                replicate=len(self.knowledge.results.get(self.incumbent.key, [])),
            )
            self.knowledge.unpaired_since_sentinel = 0

    def _proposals(self) -> Proposals:
        return Proposals(
            self.knowledge,
            self._priors,
            self.incumbent,
            left_s=self.left_s if self.knowledge.num_trials < self._max_trials else -1.0,
            seed=self._seed,
            groups_tried=self._groups_tried,
        )

    @property
    def left_s(self) -> float:
        """Seconds that trials of the search may still take."""
        return self.budget_s - self.knowledge.spent_s - self._reserve_s()

    def _reserve_s(self) -> float:
        """For the confirmation of what is best so far; nothing while that is hardly faster than the reference, or where
        the time for the fewest blocks that say something is gone already.
        """
        if not self._confirm_blocks or not self._has_something_to_confirm():
            return 0.0
        least_s = min(LEAST_BLOCKS, self._confirm_blocks) * self._block_s()
        if least_s > self.budget_s - self.knowledge.spent_s + LONGEST_OVERRUN * self.budget_s:
            return 0.0
        least, largest = LEAST_RESERVE * self.budget_s, LARGEST_RESERVE * self.budget_s
        return min(largest, max(least, RESERVE_MARGIN * self._confirm_blocks * self._block_s()))

    def _has_something_to_confirm(self) -> bool:
        best = self.best()
        if best == self.reference:
            return False
        return self.knowledge.difference(best, self.reference).probability_above(WORTHWHILE) > EVEN

    def _block_s(self) -> float:
        """Seconds of a block of the confirmation: a start of the reference and one of the incumbent."""
        return sum(self.knowledge.start_s(c) + WINDOW_S for c in (self.reference, self.incumbent))

    def _affordable(self, candidate: Candidate) -> bool:
        within = self.knowledge.expected_cost_s(candidate, self.incumbent) <= self.left_s
        return within and self.knowledge.num_trials < self._max_trials

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

    def _conclude(self, why_left_out: str, ended: str) -> None:
        """Writes down everything that was not tried, and why the search ended.

        Args:
            why_left_out: Why what promises a gain above the noise was not tried.
            ended: Why the search ended, where there is such a choice.
        """
        for move, bound in self.knowledge.untried(self.incumbent):
            above = bound > self.knowledge.threshold(self.incumbent)
            impossible = self._why_impossible(move)
            if impossible is not None:
                why = impossible
            elif above:
                self._num_left_out += 1
                why = why_left_out
            else:
                why = f"could save at most {bound:.1%} of the step: below the noise"
            self._record("end", "not_tried", why, moves=[move], bound=bound)
        for exclusion in self.space.excluded:
            self._record("end", "not_tried", exclusion.reason, moves=[exclusion.move])
        self.ended = ended if self._num_left_out or ended == INTERRUPTED else NOTHING_LEFT

    def _why_impossible(self, move: Move) -> str | None:
        impossible = self.space.why_impossible(self.incumbent, move)
        moved = self.space.combine(self.incumbent, [move])
        return impossible if moved is None else self.knowledge.will_not_fit(moved)

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
    reasons = [window.void for window in result.windows if window.void is not None]
    because = f" ({reasons[-1]}): {_remedy(reasons[-1])}" if reasons else ""
    return f"no clean window could be measured{because}"


def _remedy(void: str) -> str:
    """What to do about a machine whose windows are void."""
    if void.endswith("of the cores"):
        return "end them, or measure without --quiet-machine (in a service, without quiet_machine)"
    return "end them" if void.endswith("of the device") else "cool the device or lower its power limit, and resume"


def _purpose(stage: str, number: int) -> Purpose:
    if number:
        return Purpose.REPLICATE
    return Purpose.AUDIT if stage == "audit" else Purpose.EXPLORE
