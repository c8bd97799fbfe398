"""Searches over known surfaces, and a machine with a clock that breaks where it is told to."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import BudgetError
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import (
    Candidate,
    Choice,
    Failure,
    FailureKind,
    MeasureSettings,
    Move,
    Phase,
    Purpose,
    Recommendation,
    Study,
    StudySettings,
    Suggestion,
    TrialResult,
    TrialSpec,
    TrialState,
    WorkloadFacts,
    new_id,
)
from steptune.tuner.search.designer import Designer
from steptune.tuner.search.driver import StudyDriver
from steptune.tuner.search.knowledge import Outcome
from steptune.tuner.search.model_search import ModelSearch
from steptune.tuner.search.space import Space
from steptune.tuner.trials.fake import SEPARABLE, FakeRunner, Surface
from steptune.tuner.trials.jobs import STARTING

CREATED_AT = "2026-11-21T10:00:00+00:00"
NO_LIMIT_S = 1e9
RECOMPILING = ("fusion", "products")

SMALL = Surface(
    name="small",
    base_ms={Category.MATMUL: 40.0, Category.DATA_WAIT: 40.0, Category.OPTIMIZER: 20.0},
    factors={
        "loader": (Category.DATA_WAIT, (0.5, 0.1)),
        "products": (Category.MATMUL, (1.3, 0.6)),
        "update": (Category.OPTIMIZER, (1.25,)),
    },
)
"""Few choices: short studies. The best is loader 2 with products 2: 48 of 100 ms."""


def candidate(**levels: int) -> Candidate:
    return Candidate(choices={name: {"level": level} for name, level in levels.items()})


def move(strategy: str, level: int) -> Move:
    return Move(strategy=strategy, choice={"level": level})


def surface_space(surface: Surface = SEPARABLE, **settings: Any) -> Space:
    runner = FakeRunner(surface)
    return Space(runner.describe(), runner.inspect(), StudySettings(**settings), surface.strategies)


def run_one(
    runner: FakeRunner, what: Candidate, purpose: Purpose = Purpose.EXPLORE, trial_id: str | None = None
) -> TrialResult:
    spec = TrialSpec(
        trial_id=trial_id or new_id(), workload="fake:surface", candidate=what, choices={}, study_directory=""
    )
    return runner.run([spec], [purpose], MeasureSettings(), "group", lambda progress: None)[0]


def searched(surface: Surface, seed: int, *, trials: int = 25, noise_sd: float = 0.03) -> Designer:
    """A designer whose search has ended."""
    runner = FakeRunner(surface, noise_sd=noise_sd, seed=seed)
    designer = Designer(surface_space(surface), search=ModelSearch(), budget_s=NO_LIMIT_S, max_trials=trials, seed=seed)
    while (suggestion := designer.suggest()) is not None:
        designer.update(Outcome(result=run_one(runner, suggestion.candidate, suggestion.purpose)))
    return designer


def tell(designer: Designer, runner: FakeRunner) -> tuple[list[Suggestion], list[Outcome]]:
    """Runs what a designer suggests, until it suggests nothing more."""
    suggestions: list[Suggestion] = []
    outcomes: list[Outcome] = []
    while (suggestion := designer.suggest()) is not None:
        result = run_one(runner, suggestion.candidate, suggestion.purpose, trial_id=f"trial-{len(outcomes)}")
        suggestions.append(suggestion)
        outcomes.append(Outcome(result=result))
        designer.update(outcomes[-1])
    return suggestions, outcomes


class Machine(FakeRunner):
    """A fake runner on which time passes and things go wrong.

    Attributes:
        broken: How a trial of a candidate fails, by (strategy, level).
        compile_s: What compiling a model takes that has a choice of these strategies, first; then a tenth of that.
        start_s: What each start takes beside its compilation.
        look_s: What each look at the workload takes; those after the last are free.
        reference_s: What the guard's reference takes.
        num_references: How often one was made.
        interrupt_at: The number of the run, from 0, at which the person presses Ctrl-C; None for never.
        runs: Candidates and purposes of every run that was begun.
        caps_s: The caps of their windows.
        now_s: The clock.
    """

    def __init__(  # noqa: PLR0913  named, each with a default
        self,
        surface: Surface,
        *,
        noise_sd: float = 0.01,
        seed: int = 0,
        paired: bool = False,
        device_gb: float = math.inf,
        reference_gb: float = 0.0,
        broken: Mapping[tuple[str, int], FailureKind] | None = None,
        compile_s: Mapping[str, float] | None = None,
        start_s: float = 0.0,
        look_s: Sequence[float] = (),
        reference_s: float = 0.0,
        interrupt_at: int | None = None,
        facts: Callable[[WorkloadFacts], WorkloadFacts] = lambda facts: facts,
    ) -> None:
        super().__init__(
            surface, noise_sd=noise_sd, seed=seed, paired=paired, device_gb=device_gb, reference_gb=reference_gb
        )
        self.broken = dict(broken or {})
        self.compile_s = dict(compile_s or {})
        self.start_s = start_s
        self.look_s = list(look_s)
        self.reference_s = reference_s
        self.num_references = 0
        self.interrupt_at = interrupt_at
        self.runs: list[list[tuple[Candidate, Purpose]]] = []
        self.caps_s: list[float] = []
        self.now_s = 0.0
        self._facts = facts
        self._compiled: set[str] = set()
        self._current: Mapping[str, Choice] = {}

    def inspect(self, longest_s: float | None = None) -> WorkloadFacts:
        self._take(self.look_s.pop(0) if self.look_s else 0.0, longest_s)
        facts = self._facts(super().inspect())
        self._current = facts.current
        return facts

    def begin_reference(self, request: Any, longest_s: float) -> None:
        pass

    def make_reference(self, request: Any, longest_s: float | None = None) -> None:
        self._take(self.reference_s, longest_s)
        super().make_reference(request)
        self.num_references += 1

    def _take(self, seconds: float, longest_s: float | None) -> None:
        self.now_s += min(seconds, longest_s or seconds)
        if longest_s is not None and seconds > longest_s:
            raise BudgetError("the time for it was spent before it was done")

    def clock(self) -> float:
        return self.now_s

    def run(self, specs, purposes, settings, group, listener) -> list[TrialResult]:
        if self.interrupt_at is not None and len(self.runs) == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        self.runs.append([(spec.candidate, purpose) for spec, purpose in zip(specs, purposes, strict=True)])
        self.caps_s.append(settings.cap_s)
        results = [
            self._hurry(self._break(self._compile(self._start(result))), spec.deadlines.starting_s)
            for result, spec in zip(super().run(specs, purposes, settings, group, listener), specs, strict=True)
        ]
        self.now_s += sum(result.duration_ns for result in results) / 1e9
        return results

    @property
    def candidates_run(self) -> list[Candidate]:
        return [candidate for run in self.runs for candidate, _ in run]

    def _start(self, result: TrialResult) -> TrialResult:
        if not self.start_s or result.startup is None:
            return result
        build_ns = int(self.start_s * 1e9)
        phases_ns = {**result.phases_ns, Phase.BUILD.value: build_ns}
        return replace(result, startup=replace(result.startup, build_ns=build_ns), phases_ns=phases_ns)

    def _compile(self, result: TrialResult) -> TrialResult:
        """Models differ by the choices of strategies that say so; what was compiled once is in a cache."""
        choices = {**self._current, **result.candidate.choices}
        seconds = sum(s for name, s in self.compile_s.items() if name in choices)
        if not seconds or result.startup is None:
            return result
        recompiling = {s.name for s in self.surface.strategies if s.name in RECOMPILING}
        model = Candidate(choices={name: c for name, c in choices.items() if name in recompiling}).key
        cold = model not in self._compiled
        self._compiled.add(model)
        taken_ns = int((seconds if cold else seconds / 10) * 1e9)
        startup = replace(result.startup, compile_ns=taken_ns, warm_up_ns=taken_ns, compile_cold=cold)
        return replace(result, startup=startup, phases_ns={**result.phases_ns, Phase.WARM_UP.value: taken_ns})

    def _hurry(self, result: TrialResult, limit_s: float | None) -> TrialResult:
        """Ends a trial that is not at its first window in time."""
        starting_ns = sum(result.phases_ns.get(phase.value, 0) for phase in STARTING)
        if limit_s is None or starting_ns <= limit_s * 1e9:
            return result
        failure = Failure(kind=FailureKind.TIMEOUT, phase=Phase.WARM_UP, message=f"took more than {limit_s:g} s")
        phases_ns = {Phase.WARM_UP.value: int(limit_s * 1e9)}
        return replace(result, failure=failure, windows=(), breakdowns=(), guard=None, phases_ns=phases_ns)

    def _break(self, result: TrialResult) -> TrialResult:
        kinds = [
            k for (name, level), k in self.broken.items() if result.candidate.choices.get(name) == {"level": level}
        ]
        if not kinds or result.failure is not None:
            return result
        failure = Failure(kind=kinds[0], phase=Phase.WARM_UP, message="broken on purpose")
        return replace(result, failure=failure, windows=(), breakdowns=(), guard=None)


class StudyRun:
    """One study on one machine, with its store: run, look, run again."""

    def __init__(
        self, machine: Machine, strategies: Any = None, store: MemoryStudyStore | None = None, **settings: Any
    ):
        self.machine = machine
        self.store = store or MemoryStudyStore()
        self.strategies = machine.surface.strategies if strategies is None else strategies
        study = Study(
            study_id=new_id(),
            workload="fake:surface",
            settings=StudySettings(**{"budget_s": NO_LIMIT_S, "max_trials": 12, **settings}),
            created_at=CREATED_AT,
            directory="",
        )
        self.store.create_study(study)
        self.study_id = study.study_id
        self.stages: list[str] = []
        self.place = ""
        self.other_hardware = False

    def move_to(self, machine: Machine, place: str) -> None:
        """Goes on elsewhere, when run again."""
        machine.now_s = self.machine.now_s
        self.machine, self.place = machine, place

    def driver(self) -> StudyDriver:
        return StudyDriver(
            self.store.get_study(self.study_id),
            self.store,
            self.machine,
            strategies=self.strategies,
            clock=self.machine.clock,
            on_change=lambda view: self.stages.append(view.stage),
            place=lambda: self.place,
            other_hardware=self.other_hardware,
        )

    def run(self) -> Recommendation:
        return self.driver().run()

    @property
    def trials(self):
        return self.store.trials(self.study_id)

    @property
    def decisions(self):
        return self.store.decisions(self.study_id)

    def story(self) -> list[tuple[str, str, int]]:
        """Trials that were measured, in order: candidate, purpose, number of the start."""
        done = (trial for trial in self.trials if trial.state is not TrialState.LOST)
        return [(trial.candidate.label, trial.purpose.value, trial.replicate) for trial in done]
