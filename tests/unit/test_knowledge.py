"""Knowledge of a search: trials that took turns and trials that were measured alone are put on one scale."""

import math

import pytest
from gpu_model import GpuModel, Step
from msgspec.structs import replace
from search_builders import SMALL, candidate, surface_space

from steptune.tuner.costs.categories import Category as C
from steptune.tuner.records import (
    BASELINE,
    Candidate,
    Failure,
    FailureKind,
    MeasureSettings,
    Phase,
    Purpose,
    StudySettings,
    TrialResult,
    TrialSpec,
    new_id,
)
from steptune.tuner.search.knowledge import Knowledge, Outcome
from steptune.tuner.search.space import Space
from steptune.tuner.trials.fake import FakeRunner

LOADER = candidate(loader=2)
BOTH = candidate(loader=2, products=2)


def run_group(runner: FakeRunner, *candidates: Candidate) -> list[TrialResult]:
    specs = [
        TrialSpec(trial_id=new_id(), workload="fake:surface", candidate=c, choices={}, study_directory="")
        for c in candidates
    ]
    return runner.run(specs, [Purpose.EXPLORE] * len(specs), MeasureSettings(), new_id(), lambda progress: None)


def take_in(knowledge: Knowledge, runner: FakeRunner, *candidates: Candidate) -> None:
    *companions, result = run_group(runner, *candidates)
    knowledge.take_in(Outcome(result=result, companion=companions[0] if companions else None))


@pytest.mark.parametrize("seed", range(5))
def test_a_trial_measured_alone_is_compared_with_those_that_took_turns(seed: int) -> None:
    """Starting the incumbent again is not worth it where that is slow: its earlier rate has to do."""
    runner = FakeRunner(SMALL, noise_sd=0.01, seed=seed, paired=True)
    knowledge = Knowledge(surface_space(SMALL), BASELINE)
    for _ in range(4):
        take_in(knowledge, runner, BASELINE, BASELINE)
    take_in(knowledge, runner, BASELINE, LOADER)
    take_in(knowledge, runner, BOTH)
    truth = math.log(SMALL.total_ms(LOADER) / SMALL.total_ms(BOTH))
    assert knowledge.difference(BOTH, LOADER).mean == pytest.approx(truth, abs=0.06)
    assert knowledge.difference(BOTH, LOADER).probability_above() > 0.95


def test_where_all_take_turns_rates_are_not_looked_at() -> None:
    runner = FakeRunner(SMALL, noise_sd=0.01, seed=1, paired=True)
    knowledge = Knowledge(surface_space(SMALL), BASELINE)
    take_in(knowledge, runner, BASELINE, BASELINE)
    take_in(knowledge, runner, BASELINE, LOADER)
    assert knowledge.model.drift.sd == 0


def test_a_profile_does_not_outvote_the_windows_beside_it() -> None:
    """The profile has half of the wait for data gone, and the steps are as long as before."""
    runner = FakeRunner(SMALL, noise_sd=0.01, seed=1)
    knowledge = Knowledge(surface_space(SMALL), BASELINE)
    for _ in range(4):
        take_in(knowledge, runner, BASELINE)
    for _ in range(2):
        unchanged, claimed = run_group(runner, BASELINE)[0], run_group(runner, LOADER)[0]
        result = replace(claimed, windows=unchanged.windows)
        knowledge.take_in(Outcome(result=result), compared_with=BASELINE)
    assert knowledge.difference(LOADER, BASELINE).mean == pytest.approx(0.0, abs=0.03)


class TestOutOfMemory:
    PRODUCTS, UPDATE = candidate(products=2), candidate(update=1)
    TWO, THREE = candidate(loader=2, products=2), candidate(loader=2, products=2, update=1)

    @pytest.fixture
    def knowledge(self) -> Knowledge:
        knowledge = Knowledge(surface_space(SMALL), BASELINE)
        self.ran(knowledge, BASELINE)
        return knowledge

    def ran(self, knowledge: Knowledge, *candidates: Candidate) -> None:
        for one in candidates:
            take_in(knowledge, FakeRunner(SMALL), one)

    def ran_out(self, knowledge: Knowledge, what: Candidate) -> None:
        failure = Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.WARM_UP, message="no memory")
        result = replace(run_group(FakeRunner(SMALL), what)[0], failure=failure, windows=(), breakdowns=(), memory=())
        knowledge.take_in(Outcome(result=result))

    def test_of_two_choices_says_nothing_of_either_alone(self, knowledge: Knowledge) -> None:
        self.ran_out(knowledge, self.TWO)
        assert not knowledge.known_to_fail(LOADER)
        assert not knowledge.known_to_fail(self.PRODUCTS)

    def test_of_two_choices_keeps_from_both_with_more(self, knowledge: Knowledge) -> None:
        self.ran_out(knowledge, self.TWO)
        assert knowledge.known_to_fail(self.THREE)

    def test_is_the_doing_of_the_one_that_never_ran(self, knowledge: Knowledge) -> None:
        self.ran(knowledge, LOADER)
        self.ran_out(knowledge, self.TWO)
        assert knowledge.known_to_fail(self.THREE)

    def test_of_two_that_run_alone_is_of_both_together(self, knowledge: Knowledge) -> None:
        self.ran(knowledge, LOADER, self.PRODUCTS)
        self.ran_out(knowledge, self.TWO)
        assert knowledge.known_to_fail(self.THREE)
        assert not knowledge.known_to_fail(candidate(products=2, update=1))


WAITS = Step(
    name="launches take longer than kernels",
    gpu_ms={C.MATMUL: 8, C.ELEMENTWISE: 1},
    host_ms=20,
    optimizer_host_ms=1,
    in_16_bits={},
    whole_s=1,
    regional_s=1,
    prepare_s=1,
    num_blocks=1,
    num_block_kinds=1,
    modules={"Linear": 2},
)
REPLAYED = Candidate(choices={"compile": {"mode": "reduce-overhead"}})


class TestNoiseOfWhatIsCalm:
    """Eager starts of a step that waits for launches differ by 6 %, replayed ones by 0.4 %."""

    @pytest.fixture
    def knowledge(self) -> Knowledge:
        runner = GpuModel(WAITS)
        space = Space(runner.describe(), runner.inspect(), StudySettings())
        knowledge = Knowledge(space, BASELINE)
        for number, what in enumerate([BASELINE] * 6 + [REPLAYED] * 6):
            spec = TrialSpec(
                trial_id=f"{number}",
                workload="",
                candidate=what,
                choices=space.complete(what),
                study_directory="",
                profile=True,
            )
            results = runner.run([spec], [Purpose.EXPLORE], MeasureSettings(), f"{number}", lambda progress: None)
            knowledge.take_in(Outcome(result=results[0]))
        return knowledge

    def test_decides_what_is_looked_for_on_a_calm_incumbent(self, knowledge: Knowledge) -> None:
        assert knowledge.noise(BASELINE) > 0.05
        assert knowledge.noise(REPLAYED) < 0.02
        assert knowledge.threshold(BASELINE) > 0.02
        assert knowledge.threshold(REPLAYED) == 0.01

    def test_of_a_pair_is_between_that_of_both(self, knowledge: Knowledge) -> None:
        calm, pair, loud = (knowledge.noise_sd(*of) for of in [(REPLAYED,), (BASELINE, REPLAYED), (BASELINE,)])
        assert pair == pytest.approx(math.sqrt((calm**2 + loud**2) / 2))


@pytest.mark.parametrize(("error", "is_known"), [("products.RefusedError", True), ("loader.RefusedError", False)])
def test_a_failure_that_names_its_strategy_is_not_blamed_on_another(
    error: str, monkeypatch: pytest.MonkeyPatch, *, is_known: bool
) -> None:
    """Also where all the others are known to run."""
    knowledge = Knowledge(surface_space(SMALL), BASELINE)
    for name in ("loader", "products"):
        monkeypatch.setattr(knowledge.space.strategy(name), "raises", (f"{name}.",), raising=False)
    runner = FakeRunner(SMALL)
    for one in (BASELINE, LOADER):
        take_in(knowledge, runner, one)
    failure = Failure(kind=FailureKind.UNSUPPORTED, phase=Phase.WARM_UP, message="", error=error)
    result = replace(run_group(runner, BOTH)[0], failure=failure, windows=(), breakdowns=())
    knowledge.take_in(Outcome(result=result))
    assert knowledge.known_to_fail(candidate(products=2)) == is_known
