"""Choice of the next trial: the reference, then winners of similar studies, then proposals of a search.

The designer asks a search (`searches.py`), runs the first proposal that can be run within the budget, judges its
outcome and keeps the record. Whichever search proposes, the outcome is judged by one Gaussian model of everything
measured (`gaussian.py`), and the measured configuration with the best expected step is the answer.

It is a pure function of the space, the settings and the results in order: it reads no clock, no file and no global
state, so that a study can be replayed, resumed and run against modelled machines.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence

import numpy as np

from steptune.tuner.profiling.diagnosis import diagnose
from steptune.tuner.profiling.evidence import Evidence
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
from steptune.tuner.search.gaussian import one_blas_thread
from steptune.tuner.search.grid import Grid
from steptune.tuner.search.history import History, Proposal, Search
from steptune.tuner.search.knowledge import WORTHWHILE, Knowledge, Outcome, Priors, without_effect
from steptune.tuner.search.model_search import UNLIKELY, WORTH
from steptune.tuner.search.similar import is_alike
from steptune.tuner.search.space import Space

LEAST_RESERVE, LARGEST_RESERVE = 0.12, 0.38
"""Minimum and maximum share of the budget that is kept for the confirmation."""
RESERVE_MARGIN = 1.1
COMPILE_SHARE, COMPILE_MARGIN = 0.5, 1.5
"""Share of the time left, and multiple of its expected time, that a first compilation may take at most once there is
something to confirm; the larger of the two applies.
"""
WINDOW_S = 1.2
"""Seconds of windows in each run of the confirmation."""
CLEARLY, PERHAPS = 0.9, 0.15
"""Minimum probabilities of a worthwhile gain over the incumbent: for a candidate to rank before the incumbent, and for
a candidate to become a finalist.
"""
HARDLY = 0.1
"""Minimum probability of being faster than the incumbent; with less, a configuration counts as having no gain."""
EVEN = 0.5
NEEDED_CANDIDATES = 3
"""Minimum number of candidates that a search should have time to try."""
BUDGET_SPENT, INTERRUPTED, NOTHING_LEFT = "budget spent", "interrupted", "no bound above noise"
"""Reasons why a search ended."""

Story = Generator[Suggestion, Outcome, None]


class Designer:
    """Designer of a study's trials: suggests the next one, and learns from its outcome.

    Args:
        search: Proposes configurations.
        reference: The configuration that gains are measured against: the user's own, or the nearest
            feasible one where that does not fit into memory.
        budget_s: Seconds of trials that the search and the confirmation may spend.
        confirm_blocks: Blocks of the confirmation, for which a part of the budget is kept; 0 keeps nothing.
        max_trials: Maximum number of suggestions.
        ran_out: Trials of configurations nearer to today's that ran out of memory.
    """

    def __init__(
        self,
        space: Space,
        *,
        search: Search,
        budget_s: float,
        max_trials: int,
        confirm_blocks: int = 0,
        seed: int = 0,
        priors: Priors | None = None,
        reference: Candidate = BASELINE,
        ran_out: Sequence[TrialResult] = (),
    ) -> None:
        self.space = space
        self.search = search
        self.grid = Grid(space, reference)
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
        self._num_left_out = 0
        self._starts: list[TrialResult] = list(ran_out)
        self._history: History | None = None
        self.ran_out = tuple(ran_out)
        for result in self.ran_out[:1]:
            self.knowledge.take_in_beside(result)
        # That others ran out of memory in today's precision is no hint to try them in exchange for something.
        self.knowledge.spent_s += sum(result.duration_ns for result in self.ran_out[1:]) / 1e9
        self._story = self._tell()
        self._next: Suggestion | None = None
        self._advance(None)

    # --- the interface ------------------------------------------------------------------------

    @property
    def reference(self) -> Candidate:
        return self.knowledge.reference

    def baseline_results(self) -> list[TrialResult]:
        """Return the good results of the reference."""
        return [result for result in self.knowledge.results.get(self.reference.key, []) if result.ok]

    def suggest(self) -> Suggestion | None:
        """Return the next trial, or None when the search has ended; changes nothing."""
        return self._next

    def update(self, outcome: Outcome) -> None:
        """Learn from the outcome of the suggestion."""
        assert self._next is not None, "the search has ended"
        self._hear([result for result in (outcome.companion, outcome.result) if result is not None])
        self.knowledge.take_in(outcome, self._next.companion)
        self._advance(outcome)

    def stop(self, why: str, ended: str) -> None:
        """End the search early, and record the remaining choices as not tried.

        Args:
            why: Reason why the rest was not tried.
            ended: `BUDGET_SPENT` or `INTERRUPTED`.
        """
        if self._next is not None:
            self._next = None
            self._conclude(why, ended)

    def learn(self, result: TrialResult) -> None:
        """Learn from a trial that the designer did not suggest; the current suggestion stays open."""
        self._hear([result])
        self.knowledge.take_in_beside(result)

    def _hear(self, results: Sequence[TrialResult]) -> None:
        self._starts += results
        self._history = None
        self.search.update(results)

    @property
    def history(self) -> History:
        """Current history, as given to the search."""
        if self._history is None:
            self._history = History(
                grid=self.grid,
                knowledge=self.knowledge,
                starts=tuple(self._starts),
                incumbent=self.incumbent,
                left_s=self.left_s,
                num_left=self._max_trials - self.knowledge.num_trials,
                seed=self._seed,
                realisation=self._priors.realisation,
            )
        return self._history

    def best(self) -> Candidate:
        """Return the candidate that the search would recommend without a confirmation."""
        return self.incumbent

    def finalists(self, count: int) -> list[Candidate]:
        """Return the incumbent and candidates that may be better; the incumbent comes first unless one is clearly
        better.
        """
        found = [(CLEARLY, self.incumbent)] if self.incumbent != self.reference else []
        for candidate in self.knowledge.measured() if self.baseline_results() else []:
            if candidate != self.incumbent and not self.knowledge.had_no_effect(candidate):
                chance = self.difference(candidate, self.incumbent).probability_above(WORTHWHILE)
                found += [(chance, candidate)] * (chance > PERHAPS)
        found.sort(key=lambda pair: -pair[0])
        return [candidate for _, candidate in found][:count]

    def difference(self, candidate: Candidate, other: Candidate) -> Difference:
        """Return the posterior of the log ratio of two rates: the candidate's over the other one's."""
        levels = [self.grid.levels_of(c) for c in (candidate, other)]
        if None in levels:
            return self.knowledge.difference(candidate, other)
        with one_blas_thread():
            model = self.history.model
            both = model.believe(np.array(levels, dtype=np.int64))
            covariance = model.covariance(both, both)
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        return Difference(mean=float(both.mean[1] - both.mean[0]), sd=math.sqrt(max(variance, 1e-10)))

    @property
    def has_searched(self) -> bool:
        """True if a candidate was judged, or if no candidate promised a gain above the noise. A candidate that timed
        out in the remaining time does not count.
        """
        others = (r for results in self.knowledge.results.values() for r in results if r.candidate != self.reference)
        late = {FailureKind.TIMEOUT} if self.ended in (BUDGET_SPENT, INTERRUPTED) else set()
        return self.ended == NOTHING_LEFT or any(r.failure is None or r.failure.kind not in late for r in others)

    def no_time_for(self) -> list[str]:
        """Describe the parts of the search that were left out for lack of time, one phrase each."""
        missed = []
        if self._num_left_out and self.ended in (BUDGET_SPENT, INTERRUPTED):
            most = max(bound for _, bound in self.knowledge.untried(self.incumbent))
            choices = "1 choice that" if self._num_left_out == 1 else f"{self._num_left_out} choices that each"
            missed.append(f"{choices} may still save up to {most:.0%} of the step")
        return missed

    def needed_s(self) -> float:
        """Return the seconds that a study needs: the measured time of the baseline's trials, plus the expected time of
        a short search and a confirmation.
        """
        baseline_s = sum(r.duration_ns for r in self.baseline_results()) / 1e9
        promising = [
            m for m, b in self.knowledge.untried(self.incumbent) if b > self.knowledge.threshold(self.incumbent)
        ]
        moved = [c for move in promising if (c := self.space.combine(self.incumbent, [move])) is not None]
        costs_s = sorted(self.knowledge.expected_cost_s(candidate, self.incumbent) for candidate in moved)
        searching_s = sum(costs_s[:NEEDED_CANDIDATES])
        return baseline_s + searching_s + RESERVE_MARGIN * self._confirm_blocks * self._block_s()

    def certificate(self) -> Certificate:
        """Return the certificate about everything that was not tried."""
        return Certificate(
            remaining_bound=max((bound for _, bound in self.knowledge.untried(self.incumbent)), default=0.0),
            status="estimated",
            noise=self.knowledge.noise(self.incumbent),
            ended=self.ended,
            not_tried=tuple(decision for decision in self.decisions if decision.verdict == "not_tried"),
            audits=self._priors.audits,
            audit_violations=self._priors.audit_violations,
            probability_left=self._probability_left,
        )

    @property
    def _probability_left(self) -> float | None:
        """Probability that another configuration has a gain above `WORTH`; None where the search has no estimate."""
        return getattr(self.search, "probability_left", None)

    # --- what next ----------------------------------------------------------------------------

    def _tell(self) -> Story:
        for result in self.ran_out:
            self._record("baseline", "failed", why_not(result), result.candidate, outcomes=[Outcome(result=result)])
        outcome = yield Suggestion(
            candidate=self.reference,
            purpose=Purpose.BASELINE,
            stage="baseline",
            reason="the reference configuration for all gains",
        )
        if not outcome.result.ok:
            self.failed, self.ended = outcome.result, "the reference could not be measured"
            self._record("baseline", "failed", why_not(outcome.result), self.reference, outcomes=[outcome])
            return
        situation = self.knowledge.situation(self.reference)
        self.findings = diagnose(Evidence(situation=situation)) if situation else ()
        self._record("baseline", "measured", "the reference for all gains", self.reference)
        for suggestion in self._suggestions():
            outcome = yield suggestion
            if suggestion.purpose is Purpose.BASELINE:
                self._choose_incumbent()
            else:
                self._judge(suggestion, outcome)
        self._end()

    def _suggestions(self) -> Iterator[Suggestion]:
        """Yield suggestions: winners of similar studies, then the search's proposals, until none can be run."""
        for winner in self._alike_winners():
            wanted = {move.key for move in winner.moves}
            moves = [move for move in self.space.moves if move.key in wanted]
            candidate = self.space.combine(self.reference, moves)
            if candidate is not None and not self.knowledge.was_run(candidate) and self._can_run(candidate):
                reason = "best for a similar workload on similar hardware"
                yield self._suggestion(Proposal(candidate=candidate, reason=reason), "past")
        while self.history.num_left > 0:
            proposals = self.search.suggest(self.history)
            chosen = next((p for p in proposals if self._can_run(p.candidate)), None)
            if chosen is None:
                return
            yield self._suggestion(chosen, "search")

    def _alike_winners(self) -> list[Candidate]:
        """Return the winners of earlier studies whose steps spent their time in the same categories as this study's
        step.
        """
        situation = self.knowledge.own_situation(self.reference)
        now = situation.shares if situation is not None else {}
        winners = self._priors.past_winners
        before = [*self._priors.past_shares, *({} for _ in winners)]  # notes of older studies have none
        return [winner for winner, shares in zip(winners, before, strict=False) if is_alike(now, shares)]

    def _can_run(self, candidate: Candidate) -> bool:
        return self.history.may_work(candidate) and self.history.can_pay(candidate)

    def _suggestion(self, proposal: Proposal, stage: str) -> Suggestion:
        candidate = proposal.candidate
        replicate = len(self.knowledge.results.get(candidate.key, []))
        again = candidate == self.reference
        purpose = Purpose.BASELINE if again else Purpose.REPLICATE if replicate else Purpose.EXPLORE
        moves = self._changes(candidate)
        return Suggestion(
            candidate=candidate,
            purpose=purpose,
            stage="baseline" if again else stage,
            reason=proposal.reason or "proposed by the search",
            moves=moves,
            bound=self.knowledge.joint_bound(moves, self.incumbent),
            replicate=replicate,
            companion=self.incumbent if candidate != self.incumbent else self._runner_up(),
        )

    def _runner_up(self) -> Candidate | None:
        """Return the best measured configuration other than the incumbent."""
        levels, beliefs = self.history.measured
        found = (self.grid.candidate(levels[n]) for n in np.argsort(beliefs.mean))
        return next((candidate for candidate in found if candidate not in (None, self.incumbent)), None)

    def _changes(self, candidate: Candidate) -> tuple[Move, ...]:
        """Return the moves in which a candidate differs from the incumbent."""
        ours, theirs = candidate.choices, self.incumbent.choices
        names = dict.fromkeys([*ours, *theirs])
        changed = [name for name in names if ours.get(name, {}) != theirs.get(name, {})]
        return tuple(Move(strategy=name, choice=ours.get(name, {})) for name in changed)

    def _advance(self, outcome: Outcome | None) -> None:
        try:
            with one_blas_thread():
                self._next = next(self._story) if outcome is None else self._story.send(outcome)
        except StopIteration:
            self._next = None

    # --- time ---------------------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        """Seconds that trials of the search may still take."""
        return self.budget_s - self.knowledge.spent_s - self._reserve_s()

    def longest_s(self, candidate: Candidate) -> float:
        """Return the maximum seconds until a trial's first window.

        While there is nothing to confirm, a trial that compiles must leave time to try and confirm a choice that needs
        no compilation, if one is left untried. Later, a first compilation may take half of what is left, or somewhat
        more than expected: how long it takes is hardly known before (autotuning took over 7 times as long as
        compilation without it, where 4 times were expected), and others may be tried in the rest.
        """
        if not self.space.compiles_again(candidate, self.reference):
            return self.left_s
        if self._has_something_to_confirm():
            expected_s = COMPILE_MARGIN * self.history.cost_s(candidate)
            return min(self.left_s, max(COMPILE_SHARE * self.left_s, expected_s))
        if not self._has_another_without_compilation():
            return self.left_s
        another_s = self.knowledge.expected_cost_s(self.reference, self.reference) + self._least_confirmation_s()
        return max(self.left_s - RESERVE_MARGIN * another_s, self.history.cost_s(candidate))

    def _has_another_without_compilation(self) -> bool:
        """Say whether a choice is left to try that needs no new compilation."""
        untried = (self.space.combine(self.reference, [move]) for move, _ in self.knowledge.untried(self.incumbent))
        return any(c is not None and not self.space.compiles_again(c, self.reference) for c in untried)

    def _reserve_s(self) -> float:
        """Return the seconds reserved for confirming the best candidate so far. They are 0 while this candidate is
        hardly faster than the reference, or if too little time is left for the minimum number of blocks.
        """
        if not self._confirm_blocks or not self._has_something_to_confirm():
            return 0.0
        if self._least_confirmation_s() > self.budget_s - self.knowledge.spent_s + LONGEST_OVERRUN * self.budget_s:
            return 0.0
        least, largest = LEAST_RESERVE * self.budget_s, LARGEST_RESERVE * self.budget_s
        return min(largest, max(least, RESERVE_MARGIN * self._confirm_blocks * self._block_s()))

    def _least_confirmation_s(self) -> float:
        """Return the seconds of the minimum number of confirmation blocks."""
        return min(LEAST_BLOCKS, self._confirm_blocks) * self._block_s()

    def _has_something_to_confirm(self) -> bool:
        """Say whether the best candidate so far is worth confirming, judged by rates alone: the Gaussian model would
        need the time left, which depends on this answer.
        """
        best = self.best()
        if best == self.reference:
            return False
        return self.knowledge.difference(best, self.reference).probability_above(WORTHWHILE) > EVEN

    def _block_s(self) -> float:
        """Return the seconds of a confirmation block: one run of the reference and one of the incumbent."""
        return sum(self.knowledge.start_s(c) + WINDOW_S for c in (self.reference, self.incumbent))

    # --- what came of it ----------------------------------------------------------------------

    def _choose_incumbent(self) -> None:
        self._settle_on(self.history.answer())

    def _settle_on(self, incumbent: Candidate) -> None:
        if incumbent != self.incumbent:
            self.incumbent, self._history = incumbent, None  # what is expected of choices is so beside the incumbent

    def _judge(self, suggestion: Suggestion, outcome: Outcome) -> None:
        """Judge a suggestion by all results so far, and make the configuration with the best expected step the
        incumbent.
        """
        result, candidate, before = outcome.result, suggestion.candidate, self.incumbent
        why, difference = suggestion.reason, None
        if not result.ok:
            verdict, why = _why_it_does_not_count(result), f"{why}; {why_not(result)}"
        elif missing := without_effect(result, candidate):
            verdict, why = "no_effect", f"{why}; {missing}"
        else:
            difference = self.difference(candidate, before)
            verdict = "no_gain" if difference.probability_above(0) < HARDLY else "inconclusive"
        self._choose_incumbent()
        if self.incumbent == candidate != before:
            verdict = "accepted"
        self._record(
            suggestion.stage, verdict, why, candidate, suggestion.moves, [outcome], suggestion.bound, difference
        )

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

    # --- the end ------------------------------------------------------------------------------

    def _end(self) -> None:
        probability = self._probability_left
        if self.knowledge.num_trials >= self._max_trials:
            self._conclude("the limit on trials was reached", "trials spent")
        elif probability is not None and probability < UNLIKELY:
            self._conclude("a gain became unlikely", NOTHING_LEFT)
        else:
            self._conclude("the budget was spent", BUDGET_SPENT)

    def _conclude(self, why_left_out: str, ended: str) -> None:
        """Settle the answer; record why the search ended, and every untried choice with its probability of a gain."""
        self._choose_incumbent()
        for move, bound in self.knowledge.untried(self.incumbent):
            impossible = self._why_impossible(move)
            chance = 0.0 if impossible else self._chance(move)
            left_out = impossible is None and ended != NOTHING_LEFT and chance > UNLIKELY
            self._num_left_out += left_out
            unlikely = f"{chance:.0%} chance of saving {WORTH:.0%} of the step"
            self._record(
                "end", "not_tried", impossible or (why_left_out if left_out else unlikely), None, [move], (), bound
            )
        for exclusion in self.space.excluded:
            self._record("end", "not_tried", exclusion.reason, moves=[exclusion.move])
        probability = self._probability_left
        left = self._num_left_out > 0 or (probability is not None and probability >= UNLIKELY)
        self.ended = ended if left or ended == INTERRUPTED else NOTHING_LEFT

    def _chance(self, move: Move) -> float:
        """Return the probability that this single change to the incumbent saves more than `WORTH` of the incumbent's
        step.
        """
        moved = self.space.combine(self.incumbent, [move])
        if moved is None or self.grid.levels_of(moved) is None or not self.baseline_results():
            return 1.0
        return self.difference(moved, self.incumbent).probability_above(-math.log(1 - WORTH))

    def _why_impossible(self, move: Move) -> str | None:
        impossible = self.space.why_impossible(self.incumbent, move)
        moved = self.space.combine(self.incumbent, [move])
        return impossible if moved is None else self.knowledge.will_not_fit(moved)


def why_not(result: TrialResult) -> str:
    """Return the reason why a result does not count."""
    if result.failure is not None:
        return f"{result.failure.kind.value} in {result.failure.phase.value}: {result.failure.message}"
    if result.guard is not None and result.is_rejected:
        return result.guard.reason
    reasons = [window.void for window in result.windows if window.void is not None]
    because = f" ({reasons[-1]}): {_remedy(reasons[-1])}" if reasons else ""
    return f"no clean window could be measured{because}"


def _remedy(void: str) -> str:
    """Return advice for a machine with void windows, by the reason why they are void."""
    if void.endswith("of the cores"):
        return "end these programs, or measure without --quiet-machine (in a service, without quiet_machine)"
    return (
        "end these processes"
        if void.endswith("of the device")
        else "cool the device or lower its power limit, and resume"
    )


def _why_it_does_not_count(result: TrialResult) -> str:
    if result.failure is None and result.contended and not result.is_rejected:
        return "contended"
    numerics = result.failure is None or result.failure.kind is FailureKind.NUMERICS
    return "guard_rejected" if numerics and result.guard is not None else "failed"
