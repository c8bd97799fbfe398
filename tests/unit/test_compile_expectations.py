"""Expected gain of another choice of compile, and the cost of finding it out."""

import pytest
from builders import sample_environment, sample_facts
from msgspec.structs import replace
from profiled import breakdown_of, situation

from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice
from steptune.tuner.strategies import STRATEGIES, strategy_named

COMPILE = strategy_named("compile")
DEFAULTS = {strategy.name: dict(strategy.defaults) for strategy in STRATEGIES}
WAITING = breakdown_of({Category.MATMUL: 0.5, Category.HOST: 0.2, Category.LAUNCH_LATENCY: 0.3})
REGIONAL: Choice = {"mode": "default", "scope": "regional", "dynamic": False}
WHOLE: Choice = {"mode": "default", "scope": "whole", "dynamic": None}
GRAPHS: Choice = {"mode": "reduce-overhead", "scope": "whole", "dynamic": None}


def expected(choice: Choice, current: Choice | None = None) -> float | None:
    now = {**DEFAULTS, "compile": current or COMPILE.defaults}
    return COMPILE.expected(situation(WAITING, choices=now), choice)


def test_graphs_take_away_most_of_the_waiting_that_compiled_code_left():
    assert expected(GRAPHS, REGIONAL) == pytest.approx(0.7 * 0.5)
    assert expected(GRAPHS, WHOLE) == pytest.approx(0.7 * 0.5)


def test_a_model_that_waits_for_launches_gains_most_by_graphs_from_the_start():
    graphs, whole, regional = (expected(choice) for choice in (GRAPHS, WHOLE, REGIONAL))
    assert graphs > whole > regional > 0


def test_of_the_whole_model_instead_of_its_blocks_the_usual_part_of_the_bound_is_expected():
    assert expected(WHOLE, REGIONAL) is None


@pytest.mark.parametrize(("choice", "current"), [(WHOLE, GRAPHS), (REGIONAL, GRAPHS), (REGIONAL, WHOLE)])
def test_of_giving_something_up_nothing_is_expected(choice: Choice, current: Choice):
    """Without CUDA graphs, or with blocks alone, it may be faster all the same: it comes last, and is not excluded."""
    assert expected(choice, current) == pytest.approx(0.005)


def test_of_kernels_chosen_by_timing_little_is_expected():
    gain = expected({**GRAPHS, "mode": "max-autotune"}, GRAPHS)
    assert 0.005 < gain < 0.1


def test_blocks_of_many_kinds_cost_as_much_as_the_model():
    def facts(kinds: int):
        workload = sample_facts()
        return replace(workload, model=replace(workload.model, num_blocks=12, num_block_kinds=kinds))

    assert COMPILE.cost_s(REGIONAL, facts(1)) < COMPILE.cost_s(WHOLE, facts(1)) / 2
    assert COMPILE.cost_s(REGIONAL, facts(12)) >= COMPILE.cost_s(WHOLE, facts(12))


def test_the_whole_model_comes_first_where_its_blocks_are_of_as_many_kinds():
    """It costs no more then, and fusions reach over the blocks' edges."""
    environment = sample_environment()

    def first(kinds: int) -> object:
        workload = sample_facts()
        facts = replace(workload, model=replace(workload.model, num_blocks=12, num_block_kinds=kinds))
        return COMPILE.choices(environment, facts)[0]["scope"]

    assert (first(1), first(12)) == ("regional", "whole")
