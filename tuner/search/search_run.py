"""Run of a search: each suggestion of the designer is looked up or measured, and the result reported back."""

from __future__ import annotations

from collections.abc import Callable

from steptune.tuner.errors import BaselineError, BudgetError, RunnerError, SteptuneError
from steptune.tuner.estimates import units_per_s
from steptune.tuner.protocols import StudyStore
from steptune.tuner.records import Candidate, FailureKind, Purpose, Suggestion, TrialResult
from steptune.tuner.search.designer import BUDGET_SPENT, Designer, why_not
from steptune.tuner.search.group_runner import GroupRunner
from steptune.tuner.search.knowledge import Outcome
from steptune.tuner.search.ledger import Ledger
from steptune.tuner.search.preparation import ReferenceMaker
from steptune.tuner.search.specs import MIN_STARTING_S
from steptune.tuner.search.view import StudyView

MOVED_STARTS = 2
"""Number of runs of the reference, and of the incumbent, on each machine to which a study moves."""


class SearchRun:
    """Run of one study's search to its end."""

    def __init__(
        self,
        designer: Designer,
        trials: GroupRunner,
        ledger: Ledger,
        view: StudyView,
        *,
        store: StudyStore,
        study_id: str,
        place: Callable[[], str],
        guard: ReferenceMaker,
    ) -> None:
        self._designer = designer
        self._trials = trials
        self._ledger = ledger
        self._view = view
        self._store = store
        self._study_id = study_id
        self._place = place
        self._guard = guard
        self._told = {result.trial_id for result in designer.ran_out}
        self._reference_is_paid = False
        """True once the time for the guard's reference has been charged to the designer's budget."""

    def run(self) -> None:
        """Report the stored results to the designer, and run the missing trials.

        Raises:
            BaselineError: The configuration that gains are measured against could not be measured.
            RunnerError: The environment ended every attempt to measure it; elsewhere or later an attempt may succeed.
        """
        designer = self._designer
        while (suggestion := designer.suggest()) is not None:
            self._view.say(stage=suggestion.stage, current=suggestion.candidate.label, activity=suggestion.reason)
            result = self._ledger.find(suggestion.candidate, suggestion.purpose, suggestion.replicate)
            self._learn_of_others(before=result)
            if result is None:
                self._measure_here()
                try:
                    self._make_reference_for(suggestion)
                except BudgetError:
                    designer.stop("the budget was spent on the guard's reference", BUDGET_SPENT)
                    break
                result = self._measure(suggestion)
            self._tell(suggestion, result)
            self._show_progress()
        if designer.failed is not None:
            raise self._failed(designer.failed)

    def _failed(self, result: TrialResult) -> SteptuneError:
        """Return the error for a reference that could not be measured."""
        kind = result.failure.kind if result.failure else None
        if kind is FailureKind.TIMEOUT and self._view.left_s <= MIN_STARTING_S:
            return BudgetError(
                f"the budget of {self._view.budget_s:g} s was spent before the configuration that you run today was "
                f"measured: {why_not(result)}. Give a larger --budget"
            )
        message = f"the configuration that you run today could not be measured: {why_not(result)}"
        if kind is FailureKind.INFRASTRUCTURE:
            return RunnerError(message)
        return BaselineError(message, out_of_memory=kind is FailureKind.OUT_OF_MEMORY)

    def retell(self) -> None:
        """Report the stored results to the designer, up to the first missing trial."""
        while (suggestion := self._designer.suggest()) is not None:
            result = self._ledger.find(suggestion.candidate, suggestion.purpose, suggestion.replicate)
            self._learn_of_others(before=result)
            if result is None:
                return
            self._tell(suggestion, result)

    def _learn_of_others(self, *, before: TrialResult | None) -> None:
        """Report stored results that the designer did not suggest, before the suggested one. They were requested by an
        earlier version's search, or measured again on another machine.
        """
        for result in self._ledger.searched(before=before):
            if result.trial_id not in self._told:
                self._told.add(result.trial_id)
                self._designer.learn(self._ledger.counted(result))
                self._designer.knowledge.num_trials += 1
        self._learn_of_moves(before=before)

    def _tell(self, suggestion: Suggestion, result: TrialResult) -> None:
        self._told.add(result.trial_id)
        if suggestion.purpose is Purpose.BASELINE:
            self._trials.specs.learn(result)
        elif not self._reference_is_paid:
            self._designer.knowledge.spent_s += self._guard.spent_s()
            self._reference_is_paid = True
        companion = self._ledger.companion_of(result)
        self._designer.update(
            Outcome(
                result=self._ledger.counted(result),
                companion=None if companion is None else self._ledger.counted(companion),
            )
        )

    def _make_reference_for(self, suggestion: Suggestion) -> None:
        """Make the guard's reference before a candidate is measured. The baseline needs no reference, but the reference
        can be begun while the baseline runs.
        """
        if suggestion.purpose is Purpose.BASELINE:
            self._guard.begin(self._view.left_s)
        else:
            self._guard.ensure(max(MIN_STARTING_S, self._view.left_s))
            self._view.say(stage=suggestion.stage, current=suggestion.candidate.label, activity=suggestion.reason)

    def _measure(self, suggestion: Suggestion) -> TrialResult:
        """Measure a suggestion, alternating with its companion if that is worthwhile."""
        baseline = suggestion.purpose is Purpose.BASELINE
        companion = suggestion.companion
        if companion is not None and self._trials.takes_turns(suggestion.candidate, companion):
            pair, purposes = [companion, suggestion.candidate], [Purpose.COMPANION, suggestion.purpose]
        else:
            pair, purposes = [suggestion.candidate], [suggestion.purpose]
        longest_s = self._view.left_s / len(pair) if baseline else self._designer.longest_s(suggestion.candidate)
        return self._trials.run(pair, purposes, suggestion.replicate, longest_s)[-1]

    # --- studies that move from one place to another ------------------------------------------

    def _learn_of_moves(self, *, before: TrialResult | None) -> None:
        """Report to the designer the measurements that were repeated after a move to another machine, in their original
        order: before the next stored result, or before the first missing one.
        """
        for moved in self._ledger.take_moved(before=before):
            self._designer.learn(self._ledger.counted(moved))

    def _measure_here(self) -> None:
        """Measure the reference and the incumbent again where earlier figures come from another machine."""
        designer = self._designer
        wanted = [designer.reference]
        if designer.incumbent != designer.reference:
            wanted.append(designer.incumbent)
        while again := self._not_arrived(wanted):
            self._view.say(
                stage="measuring again", current=again[0].label, activity="the study moved to other cores or devices"
            )
            for group in self._trials.together(again):
                results = self._trials.run(group, [Purpose.MOVED] * len(group), self._ledger.num_moved)
                self._check_reference(results[0])
        self._learn_of_moves(before=None)

    def _not_arrived(self, wanted: list[Candidate]) -> list[Candidate]:
        return [
            candidate for candidate in wanted if not self._ledger.has_arrived(candidate, self._place(), MOVED_STARTS)
        ]

    def _check_reference(self, result: TrialResult) -> None:
        if result.candidate == self._designer.reference and not result.ok:
            raise BaselineError(
                "the study moved to other cores or devices, and its baseline could not be measured there: "
                f"{why_not(result)}"
            )

    # --- telling ------------------------------------------------------------------------------

    def _show_progress(self) -> None:
        designer, view = self._designer, self._view
        baseline = [self._ledger.as_measured(result) for result in designer.baseline_results()]
        if baseline:
            here = [result for result in baseline if result.place == baseline[-1].place]
            view.baseline_units_per_s = sum(units_per_s(r) for r in here) / len(here)
            best = designer.best()
            view.best_label = best.label
            view.best_gain = designer.difference(best, designer.reference).ratio - 1
        view.num_trials = self._ledger.num_trials
        view.num_searched = designer.knowledge.num_trials
        view.findings = designer.findings
        if len(view.decisions) != len(designer.decisions):
            view.decisions = tuple(designer.decisions)
            self._store.replace_decisions(self._study_id, designer.decisions)
        view.say()
