"""Run of a study, from its beginning or from where it was killed, to its recommendation.

The driver joins the pure designer to a runner and a store. All results of a trial are stored before the designer is
asked for the next one. On a resumed study all stored results are given to the designer again: for each suggestion the
stored result is looked up, and only what is missing is run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from steptune._version import __version__
from steptune.tuner.errors import BaselineError, RunnerError, SteptuneError, StoreError
from steptune.tuner.estimates import log_rate
from steptune.tuner.objectives import parse_objective
from steptune.tuner.protocols import StudyStore, TrialRunner
from steptune.tuner.records import Candidate, Recommendation, Study, StudyState
from steptune.tuner.search.confirmation_run import ConfirmationRun
from steptune.tuner.search.contribution_run import ContributionRun
from steptune.tuner.search.designer import INTERRUPTED, Designer
from steptune.tuner.search.group_runner import GroupRunner
from steptune.tuner.search.ledger import Ledger
from steptune.tuner.search.preparation import Preparation, Prepared, ReferenceMaker
from steptune.tuner.search.recommend import chosen_of, recommend
from steptune.tuner.search.search_run import SearchRun
from steptune.tuner.search.view import StudyInterrupt, StudyView
from steptune.tuner.speeds import is_wide
from steptune.tuner.strategies import STRATEGIES, Strategy


class StudyDriver:
    """Driver of one study.

    Args:
        store: Store that already holds the study.
        runner: Runner of trials of the study's workload, in the study's directory.
        on_change: Called with the view whenever it has changed.
        before_trials: Called before trials begin; may raise `StudyInterrupt`.
        place: Returns the current place (the machine, and its devices in use), since a host can be replaced; empty
            where there is only one. Figures of different places are compared only by their ratios to the baseline of
            their place.
        other_hardware: Whether a study begun on another hardware profile may continue on this one.
        clock: Returns the seconds of a monotonic clock.
    """

    def __init__(
        self,
        study: Study,
        store: StudyStore,
        runner: TrialRunner,
        *,
        on_change: Callable[[StudyView], None] = lambda view: None,
        before_trials: Callable[[], None] = lambda: None,
        place: Callable[[], str] = lambda: "",
        other_hardware: bool = False,
        strategies: Sequence[Strategy] = STRATEGIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.study = study
        self.prepared: Prepared | None = None
        """Preparation from which the search began; None before it is done."""
        self._store = store
        self._runner = runner
        self._before_trials = before_trials
        self._place = place
        self._other_hardware = other_hardware
        self._strategies = strategies
        self._objective = parse_objective(study.settings.objective)
        self._ledger = Ledger(store, study.study_id, self._objective)
        self.view = StudyView(
            budget_s=study.settings.budget_s,
            spent_before_s=self._ledger.spent_s,
            max_trials=study.settings.max_trials,
            on_change=on_change,
            clock=clock,
        )
        self.view.num_trials = self._ledger.num_trials
        self._confirmation: ConfirmationRun | None = None
        self._contributions: ContributionRun | None = None

    def run(self) -> Recommendation:
        """Run the rest of the study.

        A keyboard interrupt keeps everything that was measured and recommends the best so far, unconfirmed; so does a
        `StudyInterrupt` with `recommends`. Where nothing can be recommended, the interrupt is raised again.

        Raises:
            BaselineError: The user's own configuration could not be measured.
            BudgetError: The budget is too short for one trial.
            WorkloadError: Something about the workload is missing or wrong.
        """
        try:
            self._store.set_state(self.study.study_id, StudyState.RUNNING)
            return self._run()
        except StudyInterrupt as interrupt:
            if not interrupt.recommends:
                raise
            return self._finish_interrupted(interrupt.state)
        except KeyboardInterrupt:
            return self._finish_interrupted(StudyState.INTERRUPTED)
        except (StoreError, RunnerError):
            raise  # nobody's fault who wrote the workload: the study can go on
        except SteptuneError as error:
            self._store.set_state(self.study.study_id, StudyState.FAILED, str(error))
            raise

    def _run(self) -> Recommendation:
        prepared = self._prepare()
        while True:
            self.study, self.prepared = prepared.study, prepared  # an interrupt finds the study of what is prepared
            designer = prepared.designer()
            self._ledger.same_model = prepared.space.is_same_model
            trials = self._group_runner(prepared, designer)
            try:
                self._search_run(prepared, designer, trials).run()
                break
            except BaselineError as error:
                prepared = self._with_less_memory(prepared, designer, error)
        self._confirm(designer, trials)
        return self._finish(designer, StudyState.COMPLETED)

    def _confirm(self, designer: Designer, trials: GroupRunner) -> None:
        """Measure the finalists again and, if one of them is proven faster, the contribution of each of its parts."""
        begun = designer, trials, self._ledger, self.study.settings, self.view
        self._confirmation = ConfirmationRun(*begun, place=self._place)
        self._confirmation.run()
        chosen = chosen_of(designer, self._confirmation.judged())
        if chosen is not None and chosen.gain is not None and not is_wide(chosen.gain.interval):
            self._contributions = ContributionRun(*begun, place=self._place, confirmed=self._confirmation.blocks)
            self._contributions.run(chosen.candidate)

    def _with_less_memory(self, prepared: Prepared, designer: Designer, error: BaselineError) -> Prepared:
        """Return the preparation with the nearest reference that may fit into memory, after the previous reference did
        not fit.
        """
        if not error.out_of_memory or designer.failed is None:
            raise error
        nearer = prepared.after(designer.failed)
        if nearer is None:
            raise BaselineError(
                f"the workload does not fit into memory, even with settings that save memory: {error}. Use a "
                "smaller global_batch or model, or a machine with more memory",
                out_of_memory=True,
            )
        return nearer

    def _prepare(self) -> Prepared:
        return Preparation(
            self.study,
            self._store,
            self._runner,
            self.view,
            has_trials=self._ledger.num_trials > 0,
            other_hardware=self._other_hardware,
            strategies=self._strategies,
        ).prepare()

    def _group_runner(self, prepared: Prepared, designer: Designer) -> GroupRunner:
        return GroupRunner(
            prepared,
            designer.knowledge,
            store=self._store,
            runner=self._runner,
            ledger=self._ledger,
            view=self.view,
            before_trials=self._before_trials,
            place=self._place,
        )

    def _search_run(self, prepared: Prepared, designer: Designer, trials: GroupRunner) -> SearchRun:
        return SearchRun(
            designer,
            trials,
            self._ledger,
            self.view,
            store=self._store,
            study_id=self.study.study_id,
            place=self._place,
            guard=ReferenceMaker(prepared, self._runner, self._store, self.view),
        )

    # --- the end ------------------------------------------------------------------------------

    def _finish(self, designer: Designer, state: StudyState) -> Recommendation:
        run = self._confirmation
        judged = run.judged() if run else []
        recommendation = recommend(
            self.study,
            designer,
            judged,
            log_rates=functools.partial(self._log_rates, designer),
            objective=self._objective,
            tuning_s=self.view.elapsed_s + self.view.spent_before_s,
            num_trials=self._ledger.num_trials,
            version=__version__,
            no_time_for=run.no_time_for() if run else (),
            confirming=[result for block in run.blocks for result in block.values()] if run else (),
            contributions=self._contributions.gains() if self._contributions else {},
            together=self._contributions.together() if self._contributions else {},
        )
        decisions = [*designer.decisions, *(run.decisions(judged) if run else [])]
        self.view.best_label = recommendation.candidate.label
        self.view.best_gain = None if recommendation.gain is None else recommendation.gain.ratio - 1
        self.view.say(stage="done", current="", activity="")  # nobody listens to a study that has ended
        self._store.save_recommendation(recommendation, decisions=decisions, state=state)
        return recommendation

    def _log_rates(self, designer: Designer, candidate: Candidate, *, counted: bool) -> list[float]:
        """Return a candidate's log rates: from the confirmation if the candidate was in it, else from the search, never
        mixed.

        Args:
            counted: Whether results are as the objective counts them; else as they were measured.
        """
        blocks = self._confirmation.blocks if self._confirmation else []
        searched = [result for result in designer.knowledge.results.get(candidate.key, []) if result.ok]
        known = [block[candidate.key] for block in blocks if candidate.key in block] or searched
        here = [result for result in known if result.place == known[-1].place]  # rates of places are not mixed
        return [log_rate(result if counted else self._ledger.as_measured(result)).mean for result in here]

    def _finish_interrupted(self, state: StudyState) -> Recommendation:
        """Recommend the best candidate so far if a baseline was measured; else raise KeyboardInterrupt."""
        self._store.lose_running_trials(self.study.study_id)
        designer: Designer | None = None
        if self._confirmation is not None:
            designer = self._confirmation.designer
        elif self.prepared is not None:
            designer = self._told_again(self.prepared)
        if designer is None or not designer.baseline_results():
            again = self.prepared is None and self._ledger.num_trials > 0
            self._store.set_state(
                self.study.study_id, state, "the search had not continued" if again else "the baseline was not measured"
            )
            raise KeyboardInterrupt
        designer.stop("the study was interrupted", INTERRUPTED)
        return self._finish(designer, state)

    def _told_again(self, prepared: Prepared) -> Designer:
        """Return a new designer that has learned from all stored results. The previous one may lack some: the interrupt
        may have come between the storing of a result and its report to the designer, or while a resumed study repeated
        its results.
        """
        self._ledger = Ledger(self._store, self.study.study_id, self._objective)
        self._ledger.same_model = prepared.space.is_same_model
        designer = prepared.designer()
        self._search_run(prepared, designer, self._group_runner(prepared, designer)).retell()
        return designer
