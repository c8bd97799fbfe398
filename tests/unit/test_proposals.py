"""What is tried next, and what it is expected to bring."""

from __future__ import annotations

import pytest
from gpu_model import GpuModel, Step

from tuner.profiling.categories import Category as C
from tuner.records import BASELINE, Candidate, MeasureSettings, Purpose, StudySettings, TrialSpec
from tuner.search.knowledge import Knowledge, Outcome, Priors
from tuner.search.proposals import Proposal, Proposals
from tuner.search.space import Space

STEP = Step(
    name="a device that is kept busy",
    gpu_ms={C.MATMUL: 60, C.ELEMENTWISE: 20, C.COPY_D2D: 10, C.OPTIMIZER: 10},
    host_ms=5,
    optimizer_host_ms=1,
    in_16_bits={C.MATMUL: 0.3},
    whole_s=1,
    regional_s=1,
    prepare_s=1,
    num_blocks=1,
    num_block_kinds=1,
    modules={"Linear": 2},
)
O1 = Candidate(choices={"precision": {"level": "O1", "dtype": "bfloat16"}})


def next_move(incumbent: Candidate, realised: float | None) -> Proposal:
    """Of precision alone; `realised` is what earlier studies saw of its bounds."""
    runner = GpuModel(STEP)
    space = Space(runner.describe(), runner.inspect(), StudySettings(only=("precision",)))
    knowledge = Knowledge(space, BASELINE)
    for number, candidate in enumerate([BASELINE, BASELINE, incumbent, incumbent]):
        spec = TrialSpec(
            trial_id=f"{number}",
            workload="",
            candidate=candidate,
            choices=space.complete(candidate),
            study_directory="",
            profile=True,
        )
        results = runner.run([spec], [Purpose.EXPLORE], MeasureSettings(), f"{number}", lambda progress: None)
        knowledge.take_in(Outcome(result=results[0]))
    priors = Priors(realisation={} if realised is None else {"precision": realised})
    found = Proposals(knowledge, priors, incumbent, left_s=1000.0, seed=0).next_move()
    assert found is not None
    return found


def test_what_was_learned_of_first_choices_orders_them() -> None:
    assert next_move(BASELINE, 0.2).score == pytest.approx(next_move(BASELINE, None).score / 2)


def test_what_replaces_another_choice_is_not_discounted_for_it_again() -> None:
    """Expected is what O2 saves beside O1: not less of it because O1 brought less than usual elsewhere."""
    assert next_move(O1, 0.2).score == next_move(O1, None).score > 0
