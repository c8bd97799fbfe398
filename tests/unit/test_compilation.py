"""Record of what torch.compile did: breaks, recompilations and what it gave up, with reasons and source lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from steptune.tuner.profiling.compile_findings import COMPILE_RULES, diagnose_compilation
from steptune.tuner.records import Compilation, CompilationEvent
from steptune.tuner.strategies import strategy_named
from steptune.tuner.training.compilation import allow_recompilations, compilation, num_graphs, watch_compilation
from steptune.tuner.training.plan import Plan

pytestmark = [
    # Of torch itself, when it compiles.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
COMPILE = strategy_named("compile")
DEFAULT = {"mode": "default", "scope": "whole", "dynamic": None}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """TorchDynamo as in a new process."""
    from torch._dynamo.utils import clear_compilation_metrics, counters

    config = torch._dynamo.config
    limits = config.recompile_limit, config.accumulated_recompile_limit

    def renew() -> None:
        torch._dynamo.reset()
        counters.clear()
        clear_compilation_metrics()
        config.recompile_limit, config.accumulated_recompile_limit = limits

    renew()
    watch_compilation()
    yield
    renew()


class Counting(nn.Module):
    """Computes with a number that differs in every step: TorchDynamo guards its value."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(self.linear(x), 0.1, self.training) * self.number


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(x)


def effect_of(choice: dict[str, Any] = DEFAULT) -> Any:
    return COMPILE.took_effect(COMPILE.evidence(None), choice)  # type: ignore[arg-type]


def test_nothing_is_known_of_what_was_not_compiled() -> None:
    assert compilation() is None
    assert num_graphs() == 0
    assert not effect_of().took
    assert effect_of(COMPILE.defaults).took


def test_a_graph_break_is_reported_with_its_reason_and_line() -> None:
    module = Breaking()
    module.compile(backend="eager")
    module(torch.ones(2, 4))
    found = compilation()
    assert found is not None
    assert (found.num_graphs, found.num_graph_breaks) == (2, 1)
    (event,) = found.graph_breaks
    assert "graph_break()" in event.reason
    assert event.place.startswith(f"{__file__}, line ")
    assert "torch._dynamo.graph_break()" in event.place
    assert effect_of().took
    (finding,) = diagnose_compilation(found)
    assert (finding.rule, finding.severity) == ("graph_breaks", "note")
    assert __file__ in str(finding.evidence["at_1"])


def test_a_model_that_is_compiled_in_every_step_is_given_up_and_did_not_take_effect() -> None:
    module = Counting()
    module.compile(backend="eager")
    for step in range(torch._dynamo.config.recompile_limit + 2):
        module.number = step
        module(torch.ones(2, 4))
    found = compilation()
    assert found is not None
    assert found.num_given_up == 1
    assert found.num_recompilations == found.num_graphs - 1 > 0
    event = found.recompilations[0]
    assert "number" in event.reason
    assert event.place.startswith(f"forward ({__file__}, line ")
    effect = effect_of()
    assert not effect.took
    assert "too many recompilations" in effect.detail
    assert "number" in effect.detail
    assert [(f.rule, f.severity) for f in diagnose_compilation(found)] == [("compiled_too_often", "high")]


def test_blocks_that_differ_in_what_is_guarded_are_all_compiled_in_both_modes_of_training() -> None:
    """Twelve blocks of one class with a number each: evaluation mode alone uses up the default limit, so that training,
    which is what is measured, would run as it is.
    """
    count = 12
    blocks = [Counting(number) for number in range(count)]

    def run() -> None:
        for block in blocks:
            block.compile(backend="eager")
        for training in (False, True):
            for block in blocks:
                block.train(training)
                block(torch.ones(2, 4))

    run()
    given_up = compilation()
    assert given_up is not None
    assert (given_up.num_graphs, given_up.num_given_up > 0) == (torch._dynamo.config.recompile_limit, True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    allow_recompilations(count)
    run()
    found = compilation()
    assert found is not None
    assert (found.num_graphs, found.num_given_up) == (2 * count, 0)


def test_modes_with_graphs_mark_the_step_and_the_others_do_not() -> None:
    for mode, marks in (("default", 0), ("max-autotune-no-cudagraphs", 0), ("reduce-overhead", 1), ("max-autotune", 1)):
        plan = Plan()
        COMPILE.contribute(plan, {**DEFAULT, "mode": mode})
        assert len(plan.step.beginnings) == marks


def test_graphs_that_no_graph_of_the_device_could_be_made_of_did_not_take_effect() -> None:
    evidence = {"graphs": 2, "cudagraph_skips": 2, "why_skipped": "cpu device (primals_1)"}
    effect = COMPILE.took_effect(evidence, {**DEFAULT, "mode": "reduce-overhead"})
    assert not effect.took
    assert "cpu device (primals_1)" in effect.detail
    assert COMPILE.took_effect(evidence, DEFAULT).took
    assert COMPILE.took_effect({**evidence, "cudagraph_skips": 1}, {**DEFAULT, "mode": "reduce-overhead"}).took


def test_why_graphs_were_skipped_is_taken_from_inductor_s_own_words() -> None:
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    torch._dynamo.utils.counters["frames"]["total"] += 1
    log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs (1 instances)")
    found = compilation()
    assert found is not None
    assert found.num_cudagraph_skips == 1
    assert "mutated inputs (1 instances)" in [event.reason for event in found.cudagraph_skips]


@pytest.mark.parametrize("rule", COMPILE_RULES, ids=lambda rule: rule.name)
def test_each_rule_fires_on_its_own_count_only(rule: Any) -> None:
    event = (CompilationEvent(reason="why", place="where", count=2),)
    counts = {
        "compiled_too_often": {"num_given_up": 1, "recompilations": event},
        "late_compilation": {"late_graphs": 1, "recompilations": event},
        "graph_breaks": {"num_graph_breaks": 6, "graph_breaks": event},
        "cudagraphs_skipped": {"num_cudagraph_skips": 1, "cudagraph_skips": event},
    }
    (finding,) = diagnose_compilation(Compilation(num_graphs=3, **counts[rule.name]))  # type: ignore[arg-type]
    assert finding.rule == rule.name
    assert finding.evidence["at_1"] == "where: why"
    assert finding.severity in ("warning", "high")
    assert diagnose_compilation(Compilation(num_graphs=3)) == ()
    assert diagnose_compilation(None) == ()
