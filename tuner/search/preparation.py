"""Preparation of a study: inspection of the machine, the workload and the links between ranks before the first trial;
the guard's reference before the first judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from steptune.tuner.errors import BaselineError, BudgetError, HostsUnavailableError, RunnerError, StoreError
from steptune.tuner.guard.curves import Protocol
from steptune.tuner.objectives import STEPS, parse_objective
from steptune.tuner.protocols import StudyStore, TrialRunner
from steptune.tuner.records import (
    BASELINE,
    Candidate,
    Environment,
    MeasureSettings,
    Numerics,
    Study,
    StudyState,
    TrialResult,
    WorkloadFacts,
)
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.knowledge import Priors
from steptune.tuner.search.memory_model import MemoryModel, memory_model, pieces_of
from steptune.tuner.search.priors import gather_priors
from steptune.tuner.search.searches import make_search
from steptune.tuner.search.space import Space
from steptune.tuner.search.specs import SpecMaker, expected_step_ns, guard_protocol, measure_settings
from steptune.tuner.search.view import StudyView
from steptune.tuner.strategies import STRATEGIES, Strategy
from steptune.tuner.strategies.combine import environment_variables
from steptune.tuner.trials.reference import ReferenceRequest, compiles, draws_masks

SEARCH_SHARE = 0.62
"""Share of the remaining budget, after the inspection, that is planned for timing windows."""
TRIALS_WANTED = 20
MIN_CAP_S = 1.0
TWIN_SHARE = 0.02
"""Maximum share of the budget, on a GPU, for runs of the reference's twin, which has the same settings but computes in
FP32.
"""
REFERENCE_SHARE = 0.06
"""Maximum share of the budget for the guard's reference runs."""
LINKS_SHARE, LONGEST_LINKS_S = 0.04, 4.0
"""Maximum share of the budget, and maximum seconds, for timing the links between ranks."""
ROOM = 0.7
"""Maximum share of a device's memory that the reference may need if it runs while a trial compiles on the same device.
"""
REFERENCE_STAGE = "running the reference"
MANY_TRIALS = 500
STEPS_OF_A_TRIAL = 12
"""Minimum number of steps of a trial, for the guard, warm-up and windows together."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Prepared study, from which a search begins.

    Args:
        study: The study with its facts and environment.
        reference: Configuration that gains are measured against and that the guard compares with.
        trials_s: Seconds of the budget for trials.
    """

    study: Study
    space: Space
    reference: Candidate
    priors: Priors
    trials_s: float
    ran_out: tuple[TrialResult, ...] = ()
    """Results of earlier references that ran out of memory; the one with today's settings comes first."""

    def designer(self) -> Designer:
        """Return a designer of trials that has no results yet."""
        settings = self.study.settings
        limits: dict[str, Any] = {
            "budget_s": self.trials_s,
            "confirm_blocks": settings.confirm_blocks,
            "max_trials": settings.max_trials or MANY_TRIALS,
            "seed": settings.seed,
            "priors": self.priors,
            "reference": self.reference,
            "ran_out": self.ran_out,
        }
        return Designer(self.space, search=make_search(settings.search), **limits)

    def after(self, ran_out: TrialResult) -> Prepared | None:
        """Return the preparation with the next reference that needs less memory and loses no information; None if no
        such reference is left.
        """
        known = (*self.ran_out, ran_out)
        memory = memory_model(self.space, self.study.settings)
        for result in known:
            memory.ran_out_with(result.candidate, pieces_of(self.space, result.candidate))
        tried = {result.candidate.key for result in known}
        ladder = [candidate for candidate in self.space.memory_ladder() if candidate.key not in tried]
        reference = next_on(ladder, memory, self.space)
        return None if reference is None else replace(self, reference=reference, ran_out=known)

    def specs(self) -> SpecMaker:
        return SpecMaker(self.study, self.space, self.reference)

    def measure(self) -> MeasureSettings:
        """Return window settings that let `TRIALS_WANTED` trials fit into the search."""
        cap_s = max(MIN_CAP_S, SEARCH_SHARE * self.trials_s / TRIALS_WANTED / 3)
        return measure_settings(self.study.settings.measure, cap_s)


class Preparation:
    """Preparation of one study.

    Args:
        has_trials: Whether trials were measured before a restart.
        other_hardware: Whether a study begun on another hardware profile may continue on this one.
    """

    def __init__(
        self,
        study: Study,
        store: StudyStore,
        runner: TrialRunner,
        view: StudyView,
        *,
        has_trials: bool = False,
        other_hardware: bool = False,
        strategies: Sequence[Strategy] = STRATEGIES,
    ) -> None:
        self._study = study
        self._store = store
        self._runner = runner
        self._view = view
        self._has_trials = has_trials
        self._other_hardware = other_hardware
        self._strategies = tuple(strategies)

    def prepare(self) -> Prepared:
        """Inspect the machine and the workload, and measure the links.

        Raises:
            BudgetError: The budget is too short for one trial.
            StoreError: The study was begun on other hardware.
            WorkloadError: Something about the workload is missing or wrong.
        """
        environment, facts = self._look()
        parse_objective(self._study.settings.objective).check(environment.hardware, self._study.settings.num_ranks)
        study = msgspec.structs.replace(self._study, facts=facts, environment=environment)
        self._store.update_study(study)
        space = Space(environment, facts, study.settings, self._strategies)
        self._view.unit = facts.sample_unit.value
        self._check_budget(expected_step_ns(facts, environment.topology))
        # A resumed study tells its story with the seconds that it began with, however long the looks take this time.
        trials_s = study.settings.budget_s - self._prepared_s()
        return Prepared(study=study, space=space, reference=BASELINE, priors=self._priors(space), trials_s=trials_s)

    def _look(self) -> tuple[Environment, WorkloadFacts]:
        self._view.say(stage="inspecting the machine")
        known = self._study.environment
        try:
            environment = self._runner.describe()
        except HostsUnavailableError:  # which the study can wait for
            raise
        except RunnerError as error:
            if known is None:
                raise
            raise self._refused(
                known,
                f"the study cannot continue here ({error}). Resume it on the machine where it started, or start a "
                "new study",
            ) from None
        if known and known.hardware != environment.hardware and not self._other_hardware:
            raise self._refused(
                known,
                f"this machine ({environment.hardware.label}) differs in hardware or software versions, and "
                "measurements of different machines cannot be compared. Start a new study",
            )
        self._view.say(stage="inspecting the workload")
        facts = self._inspect()
        # Figures that change from one look to the next (free memory, measured peaks, links) stay as they were.
        environment = known if known and known.hardware == environment.hardware else self._with_topology(environment)
        return environment, self._study.facts or facts

    def _refused(self, known: Environment, why: str) -> StoreError:
        """Mark the study interrupted, and return an error: the study can continue only on the hardware on which it
        began.
        """
        error = StoreError(f"study {self._study.study_id} was started on {known.hardware.label}: {why}")
        self._store.set_state(self._study.study_id, StudyState.INTERRUPTED, str(error))
        return error

    def _inspect(self) -> WorkloadFacts:
        """Inspect the workload; without a time limit if the study already has trials."""
        try:
            return self._runner.inspect(None if self._has_trials else self._view.left_s)
        except BudgetError as error:
            budget_s = self._study.settings.budget_s
            raise BudgetError(f"the budget of {budget_s:g} s is too short: {error}. Give a larger --budget") from None

    def _with_topology(self, environment: Environment) -> Environment:
        """Return the environment with the links between ranks: an earlier study's if they are unchanged, else measured.

        Links that cannot be measured are recorded as an event, and stay unknown to the search.
        """
        settings, hardware = self._study.settings, environment.hardware
        if settings.num_ranks == 1:
            return environment
        self._view.say(stage="measuring the links between ranks")
        known = (
            None
            if settings.remeasure_links
            else self._store.topology(hardware, settings.num_ranks, environment.num_hosts)
        )
        seconds = min(LONGEST_LINKS_S, LINKS_SHARE * settings.budget_s)
        try:
            topology = self._runner.measure_topology(hardware, known, seconds)
        except RunnerError as error:
            self._store.add_event(self._study.study_id, "links_unknown", {"reason": str(error)})
            return environment
        if topology is not None and topology != known:
            self._store.save_topology(topology)
        return msgspec.structs.replace(environment, topology=topology)

    def _priors(self, space: Space) -> Priors:
        """Return the prior knowledge from earlier studies. It is recorded when this study begins, so that a resumed
        study uses the same knowledge.
        """
        for event in self._store.events(self._study.study_id):
            if event.kind == "priors":
                return msgspec.convert(event.data, Priors)
        priors = gather_priors(self._store, self._study.study_id, space)
        self._store.add_event(self._study.study_id, "priors", msgspec.to_builtins(priors))
        return priors

    def _prepared_s(self) -> float:
        """Return the seconds spent before the first trial, recorded when this study began."""
        for event in self._store.events(self._study.study_id):
            if event.kind == "prepared":
                return float(event.data["seconds"])
        seconds = self._view.elapsed_s
        self._store.add_event(self._study.study_id, "prepared", {"seconds": seconds})
        return seconds

    def _check_budget(self, step_ns: float) -> None:
        """Refuse a budget too short for one trial; a study that has trials continues however little time is left."""
        if self._has_trials:
            return
        needed = STEPS_OF_A_TRIAL * step_ns / 1e9
        if self._view.left_s < needed:
            raise BudgetError(
                f"the budget of {self._study.settings.budget_s:g} s is too short: {max(0, self._view.left_s):.0f} s "
                f"are left after the inspection of the workload, and one trial takes at least {needed:.0f} s "
                f"({STEPS_OF_A_TRIAL} steps of {step_ns / 1e9:.2g} s). Give a larger --budget"
            )


class ReferenceMaker:
    """Maker of the guard's reference, which is made once, before the first candidate is judged. A study without time
    for candidates does not need a reference.
    """

    def __init__(self, prepared: Prepared, runner: TrialRunner, store: StudyStore, view: StudyView) -> None:
        self._study = prepared.study
        self._space = prepared.space
        self._reference = prepared.reference
        self._runner = runner
        self._store = store
        self._view = view
        self._made = False
        self._begun = False

    def begin(self, longest_s: float) -> None:
        """Begin the reference while the first trial compiles, if the device idles meanwhile, memory suffices for both,
        and the objective does not count compilation time.
        """
        if self._begun or self._made or parse_objective(self._study.settings.objective).kind == STEPS:
            return
        self._begun = True
        request = self._requests(self._reference, self._protocol())[0]
        if request.eager and self._has_room():
            self._runner.begin_reference(request, longest_s)

    def _has_room(self) -> bool:
        """Say whether a device has memory for the reference in addition to a trial that is compiling."""
        facts, hardware = self._space.workload, self._space.environment.hardware
        needed = facts.look_peak_bytes + facts.optimizer.state_bytes
        return (
            hardware.device_kind == "cuda"
            and facts.fits_memory
            and facts.look_peak_bytes > 0
            and needed < ROOM * hardware.devices[0].memory_bytes
        )

    def ensure(self, longest_s: float) -> None:
        """Make the guard's reference unless it exists: with the study's reference configuration, or else with the first
        candidate that fits into memory and loses no information.

        Raises:
            BaselineError: Neither the study's reference nor a candidate that needs less memory can be run.
            BudgetError: Making the reference took longer than `longest_s`.
        """
        if self._made:
            return
        began_s = self._view.elapsed_s
        problem: BaselineError | None = None
        protocol = self._protocol()
        memory = memory_model(self._space, self._study.settings)
        ladder = [candidate for candidate in self._space.memory_ladder() if candidate != self._reference]
        candidate: Candidate | None = self._reference
        while candidate is not None:
            self._view.say(stage=REFERENCE_STAGE, current=candidate.label, activity="")
            for request in self._requests(candidate, protocol):
                try:
                    self._runner.make_reference(request, longest_s)
                    self._note(candidate, eager=request.eager, seconds=self._view.elapsed_s - began_s)
                    return
                except BudgetError:
                    seconds = self._view.elapsed_s - began_s
                    self._store.add_event(self._study.study_id, "reference_unfinished", {"seconds": seconds})
                    raise
                except BaselineError as error:
                    problem = problem or error
                    if not error.out_of_memory:
                        raise
            memory.ran_out_with(candidate, pieces_of(self._space, candidate))
            candidate = next_on(ladder, memory, self._space)
        raise BaselineError(
            "the workload does not fit into memory while the guard's reference runs, even with settings that "
            f"save memory: {problem}. Use a smaller global_batch or model, or a machine with more memory",
            out_of_memory=True,
        )

    def spent_s(self) -> float:
        """Return the seconds that making the reference took the first time; a resumed study counts them again."""
        made = (event for event in self._store.events(self._study.study_id) if event.kind == "reference_made")
        return next((float(event.data["seconds"]) for event in made), 0.0)

    def _note(self, candidate: Candidate, *, eager: bool, seconds: float) -> None:
        self._made = True
        data = {"candidate": candidate.label, "eager": eager, "seconds": seconds}
        self._store.add_event(self._study.study_id, "reference_made", data)

    def _protocol(self) -> Protocol:
        facts, settings = self._space.workload, self._study.settings
        return guard_protocol(
            facts,
            step_ns=expected_step_ns(facts, self._space.environment.topology),
            seconds=REFERENCE_SHARE * settings.budget_s,
            num_roundoffs=len(self._space.unit_roundoffs()),
            bias_corrections=self._space.rounds_bias_corrections(),
            lossy=bool({Numerics.LOSSY, Numerics.RECIPE} & set(settings.allow)),
            seed=settings.seed,
            draws=draws_masks(settings.num_ranks),
        )

    def _requests(self, candidate: Candidate, protocol: Protocol) -> list[ReferenceRequest]:
        """Return the requests for a reference, in the order in which they are tried. A compiled configuration is tried
        first without compilation, then with it, because compiled code may need less memory.

        A model whose randomness cannot be switched off draws other numbers when compiled, so it runs as it is.
        """
        space, choices = self._space, self._space.complete(candidate)
        device_kind = space.environment.hardware.device_kind
        as_it_is = ReferenceRequest(
            workload=self._study.workload,
            study_directory=self._study.directory,
            choices=choices,
            device=device_kind,
            protocol=protocol,
            unit_roundoffs=space.unit_roundoffs(),
            own_roundoff=space.unit_roundoff(candidate),
            bias_corrections=space.rounds_bias_corrections(),
            memory_limit_bytes=self._study.settings.memory_limit_bytes,
            environment_variables=environment_variables(choices, space.strategies),
            twin_s=None if device_kind == "cpu" else TWIN_SHARE * self._study.settings.budget_s,
        )
        if not compiles(choices) or protocol.randomness == "always":
            return [as_it_is]
        return [msgspec.structs.replace(as_it_is, eager=True), as_it_is]


def next_on(ladder: list[Candidate], memory: MemoryModel, space: Space) -> Candidate | None:
    """Return the next candidate that may serve as the reference. Candidates expected not to fit into memory come last;
    they are still tried, because predictions may be wrong.
    """
    ladder.sort(key=lambda candidate: memory.may_not_fit(candidate, pieces_of(space, candidate)))
    return ladder.pop(0) if ladder else None
