"""Running a study from its beginning, or from where it was killed, to its recommendation.

The driver joins the pure designer to a runner and a store. Everything that a trial showed is stored
before the next one is asked for. On a resumed study the designer is told its story again: for each
suggestion the stored result is looked up, and only what is missing is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

import tuner
from tuner.errors import BaselineFailed, BudgetError, RunnerError, SteptuneError, StoreError
from tuner.estimates import log_rate, units_per_s
from tuner.profiling.bounds import situation_of
from tuner.profiling.compile_findings import diagnose_compilation
from tuner.profiling.diagnosis import Evidence, diagnose
from tuner.protocols import Progress, StudyStore, TrialRunner
from tuner.records import (
    BASELINE,
    Candidate,
    Decision,
    Environment,
    FailureKind,
    Finding,
    Numerics,
    Purpose,
    Recommendation,
    Study,
    StudyState,
    TrialResult,
    TrialSpec,
    new_id,
)
from tuner.search.confirmation import LEAST_BLOCKS, Block, Finalist, judge, num_blocks, plan_blocks
from tuner.search.designer import Designer, why_not
from tuner.search.knowledge import Outcome, Priors
from tuner.search.ledger import Ledger
from tuner.search.memory_model import MemoryModel, memory_model, pieces_of
from tuner.search.priors import gather_priors
from tuner.search.recommend import recommend
from tuner.search.space import Space
from tuner.search.specs import SpecMaker, guard_protocol, measure_settings
from tuner.search.starts import usual_start_s
from tuner.strategies import STRATEGIES, Strategy
from tuner.strategies.composition import environment_variables
from tuner.trials.reference import ReferenceRequest

SEARCH_SHARE = 0.62
"""Of the budget left after looking at the workload that windows are planned for."""
TRIALS_WANTED = 20
MIN_CAP_S = 1.0
CONFIRM_CAPS = 1.5
"""Longest windows of the confirmation, in those of the search."""
REFERENCE_SHARE = 0.06
"""Of the budget that the guard's reference runs may take."""
LINKS_SHARE, LONGEST_LINKS_S = 0.04, 4.0
"""Of the budget, and in seconds at most: for timing the links between ranks."""
MANY_TRIALS = 500
MOVED_STARTS = 2
"""Starts of the reference and of the incumbent in each place to which a study moves."""
STEPS_OF_A_TRIAL = 12
"""A trial takes at least this many steps: guard, warm-up, windows."""


@dataclass
class StudyView:
    """What a person who waits wants to know; the driver keeps it up to date."""

    budget_s: float
    clock: Callable[[], float] = time.monotonic
    began_s: float = field(init=False)
    stage: str = "starting"
    current: str = ""
    activity: str = ""
    unit: str = "sample"
    baseline_units_per_s: float | None = None
    best_label: str = ""
    best_gain: float | None = None
    num_trials: int = 0
    max_trials: int | None = None
    findings: tuple[Finding, ...] = ()
    decisions: tuple[Decision, ...] = ()

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began_s


class StudyInterrupt(KeyboardInterrupt):
    """Ends a study before its end, wherever it is.

    Args:
        state: The study's from then on.
        recommends: Whether the best so far is recommended, where a baseline was measured.
    """

    def __init__(self, state: StudyState = StudyState.INTERRUPTED, *, recommends: bool = False) -> None:
        super().__init__(state.value)
        self.state = state
        self.recommends = recommends


class StudyDriver:
    """Runs one study.

    Args:
        store: Holds the study already.
        runner: For the study's workload and directory.
        on_change: Called with the view whenever it has changed.
        before_trials: Called before trials begin; may raise `StudyInterrupt`.
        place: Which machine and devices of it this is; figures of different places are compared by their ratios to
            the baseline of their place only. Empty where there is but one.
        other_hardware: Whether a study that was begun on another hardware profile may go on with this one.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        study: Study,
        store: StudyStore,
        runner: TrialRunner,
        *,
        on_change: Callable[[StudyView], None] = lambda view: None,
        before_trials: Callable[[], None] = lambda: None,
        place: str = "",
        other_hardware: bool = False,
        strategies: Sequence[Strategy] = STRATEGIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.study = study
        self.view = StudyView(budget_s=study.settings.budget_s, max_trials=study.settings.max_trials, clock=clock)
        self._store = store
        self._runner = runner
        self._on_change = on_change
        self._before_trials = before_trials
        self._place = place
        self._other_hardware = other_hardware
        self._strategies = tuple(strategies)
        self._ledger = Ledger(store, study.study_id)
        self._spent_before_s = self._ledger.spent_s
        self._designer: Designer | None = None
        self._blocks: list[dict[str, TrialResult]] = []
        self._finalists: list[Candidate] = []
        self._short_of_time = False
        """The confirmation has fewer blocks than were asked for."""

    def run(self) -> Recommendation:
        """Runs what is left of the study.

        A keyboard interrupt keeps everything that was measured and recommends the best so far,
        unconfirmed; so does a `StudyInterrupt` that says so. Where there is no recommendation it goes on up.

        Raises:
            BaselineFailed: The user's own configuration could not be measured.
            BudgetError: The budget is too short for one trial.
            WorkloadError: Something about the workload is missing or wrong.
        """
        self._store.set_state(self.study.study_id, StudyState.RUNNING)
        try:
            self._prepare()
            self._search()
            self._confirm()
            return self._finish(StudyState.COMPLETED)
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

    # --- looking at the workload --------------------------------------------------------------

    def _prepare(self) -> None:
        self._say(stage="looking at the machine")
        environment = self._runner.describe()
        known = self.study.environment
        if known and known.hardware != environment.hardware and not self._other_hardware:
            raise StoreError(
                f"study {self.study.study_id} was begun on {known.hardware.label}; this is "
                f"{environment.hardware.label}, or has other versions. Figures of different machines are not "
                "compared: begin a new study"
            )
        self._say(stage="looking at the workload")
        facts = self._runner.inspect()
        # Figures that change from one look to the next (free memory, measured peaks, links) stay as they were.
        environment = known if known and known.hardware == environment.hardware else self._with_topology(environment)
        facts = self.study.facts or facts
        self.study = msgspec.structs.replace(self.study, facts=facts, environment=environment)
        self._store.update_study(self.study)
        self._space = Space(environment, facts, self.study.settings, self._strategies)
        self.view.unit = facts.sample_unit.value
        self._check_budget(facts.sample_step_ns)
        reference = self._make_reference()
        self._specs = SpecMaker(self.study, self._space, reference)
        cap = max(MIN_CAP_S, SEARCH_SHARE * self._trials_s() / TRIALS_WANTED / 3)
        self._measure = measure_settings(self.study.settings.measure, cap)
        self._designer = self._make_designer(reference)

    def _make_designer(self, reference: Candidate) -> Designer:
        """One that has been told nothing yet."""
        settings = self.study.settings
        return Designer(
            self._space,
            budget_s=self._trials_s(),
            confirm_blocks=settings.confirm_blocks,
            max_trials=settings.max_trials or MANY_TRIALS,
            seed=settings.seed,
            priors=self._priors(),
            reference=reference,
        )

    def _with_topology(self, environment: Environment) -> Environment:
        """With the links between ranks: those that an earlier study measured, where they still are as they were.

        Links that cannot be measured are noted and leave the search to know nothing of them.
        """
        settings, hardware = self.study.settings, environment.hardware
        if settings.num_ranks == 1:
            return environment
        self._say(stage="measuring the links between ranks")
        known = (
            None
            if settings.remeasure_links
            else self._store.topology(hardware, settings.num_ranks, environment.num_hosts)
        )
        seconds = min(LONGEST_LINKS_S, LINKS_SHARE * settings.budget_s)
        try:
            topology = self._runner.measure_topology(hardware, known, seconds)
        except RunnerError as error:
            self._store.add_event(self.study.study_id, "links_unknown", {"reason": str(error)})
            return environment
        if topology is not None and topology != known:
            self._store.save_topology(topology)
        return msgspec.structs.replace(environment, topology=topology)

    def _priors(self) -> Priors:
        """What earlier studies had taught when this one began, noted then: a resumed study begins as it did."""
        for event in self._store.events(self.study.study_id):
            if event.kind == "priors":
                return msgspec.convert(event.data, Priors)
        priors = gather_priors(self._store, self._space)
        self._store.add_event(self.study.study_id, "priors", msgspec.to_builtins(priors))
        return priors

    def _trials_s(self) -> float:
        """What is there for trials. A resumed study tells its story with the seconds that it began with, however long
        the looks take this time.
        """
        return self.study.settings.budget_s - self._prepared_s()

    def _prepared_s(self) -> float:
        """What was spent before the first trial when this study began, noted then."""
        for event in self._store.events(self.study.study_id):
            if event.kind == "prepared":
                return float(event.data["seconds"])
        seconds = self.view.elapsed_s
        self._store.add_event(self.study.study_id, "prepared", {"seconds": seconds})
        return seconds

    def _check_budget(self, step_ns: int) -> None:
        """A study that has measured something goes on to its answer, however little time is left."""
        if self._ledger.num_trials:
            return
        needed = STEPS_OF_A_TRIAL * step_ns / 1e9
        if self._left_s() < needed:
            raise BudgetError(
                f"the budget of {self.study.settings.budget_s:g} s is too short: {max(0, self._left_s()):.0f} s are "
                f"left after looking at the workload, and one trial takes at least {needed:.0f} s "
                f"({STEPS_OF_A_TRIAL} steps of {step_ns / 1e9:.2g} s). Give a larger --budget"
            )

    def _make_reference(self) -> Candidate:
        """The guard's reference: the baseline, or the first candidate that needs less memory and fits."""
        facts, settings = self.study.facts, self.study.settings
        assert facts is not None
        roundoffs, corrections = self._space.unit_roundoffs(), self._space.rounds_bias_corrections()
        protocol = guard_protocol(
            facts,
            seconds=REFERENCE_SHARE * settings.budget_s,
            num_roundoffs=len(roundoffs),
            bias_corrections=corrections,
            lossy=bool({Numerics.LOSSY, Numerics.RECIPE} & set(settings.allow)),
            seed=settings.seed,
        )
        problem: BaselineFailed | None = None
        memory = memory_model(self._space, settings)
        ladder = self._space.memory_ladder()
        candidate: Candidate | None = BASELINE
        while candidate is not None:
            self._say(stage="running the reference", current=candidate.label)
            request = ReferenceRequest(
                workload=self.study.workload,
                study_directory=self.study.directory,
                choices=self._space.complete(candidate),
                device=self._space.environment.hardware.device_kind,
                protocol=protocol,
                unit_roundoffs=roundoffs,
                bias_corrections=corrections,
                memory_limit_bytes=settings.memory_limit_bytes,
                environment_variables=environment_variables(self._space.complete(candidate), self._strategies),
            )
            try:
                self._runner.make_reference(request)
                return candidate
            except BaselineFailed as error:
                problem = problem or error
                if not error.out_of_memory:
                    raise
                memory.ran_out_with(candidate, pieces_of(self._space, candidate))
                candidate = self._next_on(ladder, memory)
        raise BaselineFailed(
            f"the workload does not fit into memory, as it is or with less of it kept: {problem}. Use a smaller "
            "global_batch or model, or a machine with more memory",
            out_of_memory=True,
        )

    def _next_on(self, ladder: list[Candidate], memory: MemoryModel) -> Candidate | None:
        """Takes the first that may fit; what is expected not to comes last, because expectations may be wrong."""
        ladder.sort(key=lambda candidate: memory.may_not_fit(candidate, pieces_of(self._space, candidate)))
        return ladder.pop(0) if ladder else None

    # --- the search ---------------------------------------------------------------------------

    def _search(self) -> None:
        designer = self._designer
        assert designer is not None
        while (suggestion := designer.suggest()) is not None:
            self._say(stage=suggestion.stage, current=suggestion.candidate.label, activity=suggestion.reason)
            result = self._ledger.find(suggestion.candidate, suggestion.purpose, suggestion.replicate)
            self._learn_of_moves(result)
            if result is None:
                self._measure_here()
                companion = suggestion.companion
                if companion is not None and self._takes_turns(suggestion.candidate, companion):
                    pair, purposes = [companion, suggestion.candidate], [Purpose.COMPANION, suggestion.purpose]
                else:
                    pair, purposes = [suggestion.candidate], [suggestion.purpose]
                longest_s = None if suggestion.purpose is Purpose.BASELINE else designer.left_s
                result = self._run_group(pair, purposes, suggestion.replicate, longest_s)[-1]
            if suggestion.purpose is Purpose.BASELINE:
                self._specs.learn(result)
            designer.update(Outcome(result=result, companion=self._ledger.companion_of(result)))
            self._show_progress()
        if designer.failed is not None:
            raise BaselineFailed(
                f"the configuration that you run today could not be measured: {why_not(designer.failed)}"
            )

    def _learn_of_moves(self, result: TrialResult | None) -> None:
        """Tells the designer what was measured again elsewhere, at the point of its story at which that happened:
        before the result that is stored next, or the first that is missing.
        """
        assert self._designer is not None
        for moved in self._ledger.take_moved(before=result):
            self._designer.learn(moved)

    def _measure_here(self) -> None:
        """Where earlier figures are of another place: the reference and the incumbent again, so that what follows has
        something of this place to be compared with.
        """
        designer = self._designer
        assert designer is not None
        wanted = [designer.reference]
        if designer.incumbent != designer.reference:
            wanted.append(designer.incumbent)
        while again := [c for c in wanted if not self._ledger.has_arrived(c, self._place, MOVED_STARTS)]:
            self._say(stage="measuring again", current=again[0].label, activity="the study goes on in another place")
            for group in self._groups(again):
                results = self._run_group(group, [Purpose.MOVED] * len(group), self._ledger.num_moved)
                self._check_reference(results[0])
        self._learn_of_moves(None)

    def _check_reference(self, result: TrialResult) -> None:
        assert self._designer is not None
        if result.candidate == self._designer.reference and not result.ok:
            raise BaselineFailed(
                "the study goes on in another place, where the configuration that gains are measured against could not "
                f"be measured: {why_not(result)}"
            )

    def _takes_turns(self, candidate: Candidate, companion: Candidate) -> bool:
        """Whether both fit together, and starting the companion again costs no more than it is worth."""
        assert self._designer is not None
        results = self._designer.knowledge.results
        theirs = results.get(companion.key, [])
        if not theirs:
            return self._runner.fits_together([0, 0])
        peak = max(result.peak_memory_bytes for result in theirs)
        own = max((result.peak_memory_bytes for result in results.get(candidate.key, [])), default=int(1.3 * peak))
        cheap = usual_start_s(theirs) <= max(3.0, 2 * self._measure.cap_s)
        return cheap and self._runner.fits_together([own, peak])

    def _run_group(
        self,
        candidates: Sequence[Candidate],
        purposes: Sequence[Purpose],
        replicate: int,
        longest_s: float | None = None,
    ) -> list[TrialResult]:
        """Runs candidates in turns and stores their results; no phase takes longer than `longest_s`."""
        self._before_trials()
        specs = [self._specs.spec(c, p, replicate, longest_s) for c, p in zip(candidates, purposes, strict=True)]
        group = new_id()
        trials = self._ledger.begin(specs, purposes, group, replicate)
        self._store.add_event(
            self.study.study_id, "trials_began", {"group": group, "trials": [s.trial_id for s in specs]}
        )
        results = self._runner.run(specs, purposes, self._measure, group, self._on_progress)
        results = [
            msgspec.structs.replace(self._diagnosed(result, spec), place=self._place)
            for result, spec in zip(results, specs, strict=True)
        ]
        self._ledger.complete(trials, results)
        outcomes = {r.trial_id: r.failure.kind.value if r.failure else "completed" for r in results}
        self._store.add_event(self.study.study_id, "trials_ended", {"group": group, "outcomes": outcomes})
        return results

    def _diagnosed(self, result: TrialResult, spec: TrialSpec) -> TrialResult:
        """With the findings of its profile; an error of the workload under a candidate is the candidate's,
        because the reference ran.
        """
        failure = result.failure
        if failure is not None and failure.kind is FailureKind.WORKLOAD_ERROR and not spec.candidate.is_baseline:
            failure = msgspec.structs.replace(failure, kind=FailureKind.UNSUPPORTED)
            result = msgspec.structs.replace(result, failure=failure)
        situation = situation_of(result, self._space.workload, self._space.environment, spec.choices)
        profiled = diagnose(Evidence(situation=situation)) if situation is not None else ()
        return msgspec.structs.replace(result, findings=(*profiled, *diagnose_compilation(result.compilation)))

    # --- the confirmation ---------------------------------------------------------------------

    def _confirm(self) -> None:
        designer = self._designer
        assert designer is not None
        settings = self.study.settings
        self._finalists = designer.finalists(settings.num_finalists)
        # Fewer finalists rather than fewer blocks: an interval needs its replicates.
        while len(self._finalists) > 1:
            missing = settings.confirm_blocks - self._num_blocks_stored()
            if missing * self._least_block_s() <= self._left_s():
                break
            self._finalists.pop()
        if not self._finalists:
            return
        knowledge = designer.knowledge
        best = knowledge.difference(self._finalists[0], designer.reference)
        wanted = num_blocks(
            at_least=settings.confirm_blocks,
            noise_sd=knowledge.noise_sd(designer.reference, self._finalists[0]),
            expected_gain=best.ratio - 1,
            num_finalists=len(self._finalists),
        )
        stored = self._num_blocks_stored()
        affordable = stored + int(self._left_s() / self._least_block_s() + 1e-6)
        # Slow starts leave fewer blocks than asked for; fewer than the least say nothing.
        least = min(LEAST_BLOCKS, settings.confirm_blocks)
        count = max(least, stored, min(wanted, affordable))
        self._short_of_time = count < settings.confirm_blocks
        blocks = plan_blocks(designer.reference, self._finalists, count, settings.seed)
        measuring_s = self._left_s() / max(1, count - stored) - self._starts_s()
        cap = max(MIN_CAP_S, measuring_s / len(self._groups([designer.reference, *self._finalists])))
        cap = min(cap, CONFIRM_CAPS * self._measure.cap_s)  # starts differ more than windows of one start
        self._measure = measure_settings(settings.measure, cap)
        for block in blocks:
            if block.number >= max(least, stored) and self._left_s() <= 0:
                self._short_of_time = block.number < settings.confirm_blocks
                break  # starts took longer than in the search
            self._say(stage="confirming", current=f"block {block.number + 1} of {count}", activity="")
            self._blocks.append(self._run_block(block))

    def _run_block(self, block: Block) -> dict[str, TrialResult]:
        """One start of each; in turns where all fit together."""
        found = {c.key: self._ledger.find(c, Purpose.CONFIRM, block.number) for c in block.order}
        if not self._is_whole(found.values()):  # a block is of one place
            found = {key: result if result and result.place == self._place else None for key, result in found.items()}
        for group in self._groups([c for c in block.order if found[c.key] is None]):
            for result in self._run_group(group, [Purpose.CONFIRM] * len(group), block.number):
                found[result.candidate.key] = result
        return {key: result for key, result in found.items() if result is not None and result.ok}

    @staticmethod
    def _is_whole(found: Iterable[TrialResult | None]) -> bool:
        """Whether all of a block was measured, in one place."""
        places = {None if result is None else result.place for result in found}
        return len(places) == 1 and None not in places

    def _groups(self, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
        """What is measured at the same time: all in turns where they fit together, else one by one."""
        assert self._designer is not None
        results = self._designer.knowledge.results
        peaks = [max((r.peak_memory_bytes for r in results.get(c.key, [])), default=0) for c in candidates]
        together = bool(candidates) and self._runner.fits_together(peaks)
        return [list(candidates)] if together else [[candidate] for candidate in candidates]

    def _least_block_s(self) -> float:
        """Seconds of a block of the confirmation with the shortest windows."""
        assert self._designer is not None
        groups = self._groups([self._designer.reference, *self._finalists])
        return self._starts_s() + MIN_CAP_S * len(groups)

    def _starts_s(self) -> float:
        assert self._designer is not None
        results = self._designer.knowledge.results
        return sum(usual_start_s(results.get(c.key, [])) for c in (self._designer.reference, *self._finalists))

    def _num_blocks_stored(self) -> int:
        """Blocks of these finalists that were complete before a restart."""
        assert self._designer is not None
        order = [self._designer.reference, *self._finalists]
        number = 0
        while self._is_whole(self._ledger.find(c, Purpose.CONFIRM, number) for c in order):
            number += 1
        return number

    # --- the end ------------------------------------------------------------------------------

    def _finish(self, state: StudyState) -> Recommendation:
        designer = self._designer
        assert designer is not None
        judged = self._judged()
        recommendation = recommend(
            self.study,
            designer,
            judged,
            baseline_log_rates=self._baseline_log_rates(),
            tuning_s=self.view.elapsed_s + self._spent_before_s,
            num_trials=self._ledger.num_trials,
            version=tuner.__version__,
        )
        self._store.replace_decisions(self.study.study_id, [*designer.decisions, *self._confirmations(judged)])
        self._store.save_recommendation(recommendation)
        self._store.set_state(self.study.study_id, state)
        self._store.add_event(self.study.study_id, "recommended", {"verdict": recommendation.verdict.value})
        self._say(stage="done", current="", activity="")
        return recommendation

    def _judged(self) -> list[Finalist]:
        assert self._designer is not None
        if not self._blocks:
            return []
        return judge(self._designer.reference, self._finalists, self._blocks, self._baseline_results())

    def _finish_interrupted(self, state: StudyState) -> Recommendation:
        """The best so far, where a baseline was measured; else nothing can be said."""
        self._store.lose_running_trials(self.study.study_id)
        if self._designer is not None and not self._baseline_results():
            self._take_in_stored(self._designer.reference)
        if self._designer is None or not self._baseline_results():
            self._store.set_state(self.study.study_id, state, "before the baseline was measured")
            raise KeyboardInterrupt
        return self._finish(state)

    def _take_in_stored(self, reference: Candidate) -> None:
        """Tells a new designer what is stored: the interrupt may have come between storing the baseline and telling."""
        self._ledger = Ledger(self._store, self.study.study_id)
        designer = self._designer = self._make_designer(reference)
        while (asked := designer.suggest()) is not None:
            result = self._ledger.find(asked.candidate, asked.purpose, asked.replicate)
            if result is None:
                return
            designer.update(Outcome(result=result, companion=self._ledger.companion_of(result)))

    def _baseline_results(self) -> list[TrialResult]:
        assert self._designer is not None
        return [r for r in self._designer.knowledge.results.get(self._designer.reference.key, []) if r.ok]

    def _baseline_log_rates(self) -> list[float]:
        """Of the confirmation where there was one; those that selected are not mixed in."""
        assert self._designer is not None
        key = self._designer.reference.key
        confirmed = [block[key] for block in self._blocks if key in block]
        known = confirmed or self._baseline_results()
        here = [result for result in known if result.place == known[-1].place]  # rates of places are not mixed
        return [log_rate(result).mean for result in here]

    def _confirmations(self, judged: Sequence[Finalist]) -> list[Decision]:
        assert self._designer is not None
        first = len(self._designer.decisions) + 1
        return [
            Decision(
                sequence=first + number,
                stage="confirm",
                verdict="confirmed" if finalist.is_faster else "not_confirmed",
                reason=self._how_confirmed(len(finalist.log_ratios)),
                candidate=finalist.candidate,
                measured_gain=finalist.gain.ratio - 1 if finalist.gain else None,
            )
            for number, finalist in enumerate(judged)
        ]

    def _how_confirmed(self, num_starts: int) -> str:
        wanted = self.study.settings.confirm_blocks
        short = f": not the {wanted} asked for, because the budget was spent" if self._short_of_time else ""
        return f"{num_starts} starts against the baseline in random order{short}"

    # --- telling ------------------------------------------------------------------------------

    def _left_s(self) -> float:
        return self.study.settings.budget_s - self.view.elapsed_s - self._spent_before_s

    def _say(self, **changes: str) -> None:
        for name, value in changes.items():
            setattr(self.view, name, value)
        self._on_change(self.view)

    def _on_progress(self, progress: Progress) -> None:
        self._say(activity=f"{progress.text}")

    def _show_progress(self) -> None:
        designer, view = self._designer, self.view
        assert designer is not None
        baseline = self._baseline_results()
        if baseline:
            here = [result for result in baseline if result.place == baseline[-1].place]
            view.baseline_units_per_s = sum(units_per_s(r) for r in here) / len(here)
            best = designer.best()
            view.best_label = best.label
            view.best_gain = designer.knowledge.difference(best, designer.reference).ratio - 1
        view.num_trials = self._ledger.num_trials
        view.findings = designer.findings
        if len(view.decisions) != len(designer.decisions):
            view.decisions = tuple(designer.decisions)
            self._store.replace_decisions(self.study.study_id, designer.decisions)
        self._on_change(view)
