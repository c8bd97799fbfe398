"""What a search knows: trials that took turns and trials that were measured alone are put on one scale."""

import math

import pytest
from search_builders import SMALL, candidate, surface_space

from tuner.records import BASELINE, Candidate, MeasureSettings, Purpose, TrialResult, TrialSpec, new_id
from tuner.search.knowledge import Knowledge, Outcome
from tuner.trials.fake import FakeRunner

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
