"""A designer that asks a search what to try: it begins with the reference and what won in similar studies, then runs
what is proposed, judges what came of it and keeps the record.

Whatever proposes, what ran is judged by one Gaussian model of everything measured (`gaussian.py`), and the measured
configuration with the best expected step is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from steptune.tuner.profiling.diagnosis import Evidence, diagnose
from steptune.tuner.records import BASELINE, Candidate, Certificate, FailureKind, Move, Purpose, Suggestion, TrialResult
from steptune.tuner.search.designer import BUDGET_SPENT, INTERRUPTED, NOTHING_LEFT, Designer, Story, why_not
from steptune.tuner.search.effects import Difference
from steptune.tuner.search.gaussian import one_blas_thread
from steptune.tuner.search.grid import Grid
from steptune.tuner.search.history import History, Proposal, Search
from steptune.tuner.search.knowledge import WORTHWHILE, Outcome, without_effect
from steptune.tuner.search.model_search import UNLIKELY, WORTH
from steptune.tuner.search.space import Space

CLEARLY, PERHAPS = 0.9, 0.15
"""Probability of a worthwhile gain over the best from which another comes before it, and is a finalist at all."""
HARDLY = 0.1
"""Probability of being faster below which a configuration has no gain."""


class AskingDesigner(Designer):
    """Suggests what a search proposes.

    Args:
        search: That proposes.
        limits: As of `Designer`.
    """

    def __init__(self, space: Space, *, search: Search, **limits: Any) -> None:
        self.search = search
        self.grid = Grid(space, limits.get("reference", BASELINE))
        self._starts: list[TrialResult] = list(limits.get("ran_out", ()))
        self._history: History | None = None
        super().__init__(space, **limits)

    # --- the interface ------------------------------------------------------------------------

    def update(self, outcome: Outcome) -> None:
        """Takes in what came of the suggestion."""
        self._hear([result for result in (outcome.companion, outcome.result) if result is not None])
        super().update(outcome)

    def learn(self, result: TrialResult) -> None:
        """Takes in a trial that was not suggested: the suggestion stays as it is."""
        self._hear([result])
        super().learn(result)

    def _hear(self, results: Sequence[TrialResult]) -> None:
        self._starts += results
        self._history = None
        self.search.update(results)

    @property
    def history(self) -> History:
        """What a search is told now."""
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
        """What the search would recommend without a confirmation."""
        return self.incumbent

    def finalists(self, count: int) -> list[Candidate]:
        """The incumbent and others that may well be better than it, the incumbent first unless another clearly is."""
        found = [(CLEARLY, self.incumbent)] if self.incumbent != self.reference else []
        for candidate in self.knowledge.measured() if self.baseline_results() else []:
            if candidate != self.incumbent and not self.knowledge.had_no_effect(candidate):
                chance = self.difference(candidate, self.incumbent).probability_above(WORTHWHILE)
                found += [(chance, candidate)] * (chance > PERHAPS)
        found.sort(key=lambda pair: -pair[0])
        return [candidate for _, candidate in found][:count]

    def difference(self, candidate: Candidate, other: Candidate) -> Difference:
        """Posterior of the logarithm of a configuration's rate over another's."""
        levels = [self.grid.levels_of(c) for c in (candidate, other)]
        if None in levels:
            return self.knowledge.difference(candidate, other)
        model = self.history.model
        both = model.believe(np.array(levels, dtype=np.int64))
        covariance = model.covariance(both, both)
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        return Difference(mean=float(both.mean[1] - both.mean[0]), sd=math.sqrt(max(variance, 1e-10)))

    def certificate(self) -> Certificate:
        """What is known about everything that was not tried."""
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
        """That something untried is worth going on for; None where the search says nothing of it."""
        return getattr(self.search, "probability_left", None)

    # --- what next ----------------------------------------------------------------------------

    def _tell(self) -> Story:
        for result in self._ran_out:
            self._record("baseline", "failed", why_not(result), result.candidate, outcomes=[Outcome(result=result)])
        outcome = yield Suggestion(
            candidate=self.reference,
            purpose=Purpose.BASELINE,
            stage="baseline",
            reason="the configuration that gains are measured against",
        )
        if not outcome.result.ok:
            self.failed, self.ended = outcome.result, "the reference could not be measured"
            self._record("baseline", "failed", why_not(outcome.result), self.reference, outcomes=[outcome])
            return
        situation = self.knowledge.situation(self.reference)
        self.findings = diagnose(Evidence(situation=situation)) if situation else ()
        self._record("baseline", "measured", "what gains are measured against", self.reference)
        for suggestion in self._suggestions():
            outcome = yield suggestion
            if suggestion.purpose is Purpose.BASELINE:
                self._choose_incumbent()
            else:
                self._judge(suggestion, outcome)
        self._end()

    def _suggestions(self) -> Iterator[Suggestion]:
        """What won before, then what the search proposes, until it proposes nothing more that can be run."""
        for winner in self._priors.past_winners:
            wanted = {move.key for move in winner.moves}
            moves = [move for move in self.space.moves if move.key in wanted]
            candidate = self.space.combine(self.reference, moves)
            if candidate is not None and not self.knowledge.was_run(candidate) and self._can_run(candidate):
                reason = "won for a similar workload on such hardware"
                yield self._suggestion(Proposal(candidate=candidate, reason=reason), "past")
        while self.history.num_left > 0:
            with one_blas_thread():
                proposals = self.search.suggest(self.history)
            chosen = next((p for p in proposals if self._can_run(p.candidate)), None)
            if chosen is None:
                return
            yield self._suggestion(chosen, "search")

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
            companion=self.incumbent if candidate != self.incumbent else None,
        )

    def _changes(self, candidate: Candidate) -> tuple[Move, ...]:
        """What it has otherwise than the incumbent."""
        ours, theirs = candidate.choices, self.incumbent.choices
        names = dict.fromkeys([*ours, *theirs])
        changed = [name for name in names if ours.get(name, {}) != theirs.get(name, {})]
        return tuple(Move(strategy=name, choice=ours.get(name, {})) for name in changed)

    # --- what came of it ----------------------------------------------------------------------

    def _choose_incumbent(self) -> None:
        self.incumbent = self.history.answer()
        self._history = None

    def _judge(self, suggestion: Suggestion, outcome: Outcome) -> None:  # type: ignore[override]
        """By all that is known now: the incumbent is whatever has the best expected step."""
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

    # --- the end ------------------------------------------------------------------------------

    def _end(self) -> None:
        probability = self._probability_left
        if self.knowledge.num_trials >= self._max_trials:
            self._conclude("the trials were spent", "trials spent")
        elif probability is not None and probability < UNLIKELY:
            self._conclude("a gain became unlikely", NOTHING_LEFT)
        else:
            self._conclude("the budget was spent", BUDGET_SPENT)

    def _conclude(self, why_left_out: str, ended: str) -> None:
        """Writes down every choice that was not tried, with how likely it would have paid, and why the search ended."""
        for move, bound in self.knowledge.untried(self.incumbent):
            impossible = self._why_impossible(move)
            chance = 0.0 if impossible else self._chance(move)
            left_out = impossible is None and ended != NOTHING_LEFT and chance > UNLIKELY
            self._num_left_out += left_out
            unlikely = f"{chance:.0%} likely to save {WORTH:.0%} of the step"
            self._record(
                "end", "not_tried", impossible or (why_left_out if left_out else unlikely), None, [move], (), bound
            )
        for exclusion in self.space.excluded:
            self._record("end", "not_tried", exclusion.reason, moves=[exclusion.move])
        probability = self._probability_left
        left = self._num_left_out > 0 or (probability is not None and probability >= UNLIKELY)
        self.ended = ended if left or ended == INTERRUPTED else NOTHING_LEFT

    def _chance(self, move: Move) -> float:
        """Probability that a change alone makes the incumbent faster by what is worth going on for."""
        moved = self.space.combine(self.incumbent, [move])
        if moved is None or self.grid.levels_of(moved) is None or not self.baseline_results():
            return 1.0
        return self.difference(moved, self.incumbent).probability_above(-math.log(1 - WORTH))


def _why_it_does_not_count(result: TrialResult) -> str:
    if result.failure is None and result.contended:
        return "contended"
    numerics = result.failure is None or result.failure.kind is FailureKind.NUMERICS
    return "guard_rejected" if numerics and result.guard is not None else "failed"
