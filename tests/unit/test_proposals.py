"""What is tried next, and what it is expected to bring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_model import GpuModel, Step

from steptune.tuner.profiling.categories import Category as C
from steptune.tuner.records import BASELINE, Candidate, Finding, MeasureSettings, Purpose, StudySettings, TrialSpec
from steptune.tuner.search.knowledge import Knowledge, Outcome, Priors
from steptune.tuner.search.proposals import Proposal, Proposals
from steptune.tuner.search.space import Space

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


COPIES = replace(STEP, name="a device that waits for copies", gpu_ms={C.MATMUL: 60, C.COPY_H2D: 40})


def next_move(incumbent: Candidate, realised: float | None) -> Proposal:
    """Of precision alone; `realised` is what earlier studies saw of its bounds."""
    priors = Priors(realisation={} if realised is None else {"precision": realised})
    found = proposals(STEP, incumbent, ("precision",), priors).next_move()
    assert found is not None
    return found


def proposals(
    step: Step, incumbent: Candidate, only: tuple[str, ...], priors: Priors | None = None, left_s: float = 1000.0
) -> Proposals:
    """Once the baseline and the incumbent have been run twice."""
    runner = GpuModel(step)
    space = Space(runner.describe(), runner.inspect(), StudySettings(only=only))
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
    return Proposals(knowledge, priors or Priors(), incumbent, left_s=left_s, seed=0)


def test_what_was_learned_of_first_choices_orders_them() -> None:
    assert next_move(BASELINE, 0.2).score == pytest.approx(next_move(BASELINE, None).score / 2)


def test_what_replaces_another_choice_is_not_discounted_for_it_again() -> None:
    """Expected is what O2 saves beside O1: not less of it because O1 brought less than usual elsewhere."""
    assert next_move(O1, 0.2).score == next_move(O1, None).score > 0


def test_what_is_legal_only_beside_another_is_tried_with_it() -> None:
    """Copying ahead needs pinned memory: both at once, and no workers, since nothing waits for data."""
    found = proposals(COPIES, BASELINE, ("data_loading", "device_prefetch")).next_move()
    assert found is not None
    assert {move.strategy: dict(move.choice) for move in found.moves} == {
        "data_loading": {"pin_memory": True},
        "device_prefetch": {"ahead": True},
    }


def test_where_the_other_may_not_change_nothing_is_tried_that_needs_it() -> None:
    assert proposals(COPIES, BASELINE, ("device_prefetch",)).next_move() is None


def test_a_graph_goes_with_the_flag_that_makes_it_possible() -> None:
    """What waits for launches gains by a graph; the flag alone gains hardly anything, and comes for the graph."""
    step = replace(STEP, gpu_ms={C.MATMUL: 20, C.ATTENTION: 10}, host_ms=100, host_read="masks", mask_refusal="")
    found = proposals(step, BASELINE, ("attention_mask", "cuda_graph")).next_move()
    assert found is not None
    assert {move.strategy: dict(move.choice) for move in found.moves} == {
        "attention_mask": {"is_causal": True},
        "cuda_graph": {"scope": "step"},
    }


@pytest.mark.parametrize(("left_s", "mode"), [(1000.0, "default"), (110.0, "reduce-overhead"), (50.0, "default")])
def test_what_promises_much_more_is_not_put_off_until_it_no_longer_fits(left_s: float, mode: str) -> None:
    """Compiled blocks are soon tried, a compiled model with graphs promises twice as much: with time for one, that."""
    kernels = {C.MATMUL: 60, C.ELEMENTWISE: 6, C.OPTIMIZER: 20}
    step = replace(STEP, gpu_ms=kernels, host_ms=300, optimizer_host_ms=40, num_blocks=24)
    found = proposals(step, BASELINE, ("compile",), left_s=left_s).next_move()
    assert found is not None
    assert found.moves[0].choice["mode"] == mode


@pytest.mark.parametrize("attention_ms", [0.7, 30.0])
def test_a_recipe_has_nothing_that_is_expected_to_save_hardly_anything(attention_ms: float) -> None:
    """A flag that only a compiler gains by is no cure, even where hardly anything is much of what it could save."""
    kernels = {C.MATMUL: 70 - attention_ms, C.ATTENTION: attention_ms, C.OPTIMIZER: 30}
    step = replace(STEP, gpu_ms=kernels, mask_refusal="")
    finding = Finding(
        rule="compute",
        severity="high",
        message="the device computes",
        advice="",
        strategies=("attention_mask", "optimizer_implementation", "precision"),
        bound=0.3,
    )
    found = proposals(step, BASELINE, finding.strategies).recipe(finding)
    assert found is not None
    names = {move.strategy for move in found.moves}
    assert names == {"optimizer_implementation", "precision"}
