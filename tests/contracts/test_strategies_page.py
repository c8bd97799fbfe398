"""The page of strategies and `steptune strategies`: every choice is described where it is legal.

What the page says is held against workloads and machines of these tests, not against those that it was generated from.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from builders import sample_environment, sample_facts
from msgspec.structs import replace
from test_strategies import CLUSTER, CPU, CUDA, EVERYTHING, ONE_GPU

from steptune.service.cli.catalogue import _row
from steptune.service.described import MACHINES, WORKLOADS
from steptune.tuner.records import Environment, WorkloadFacts, choice_label
from steptune.tuner.strategies import STRATEGIES, Supported

PAGE = (Path(__file__).parents[2] / "docs/reference/strategies.md").read_text()
OTHERS = {"CPU": (CPU,), "1 GPU": (ONE_GPU,), "4 GPUs": (CUDA,), "2 × 4 GPUs": (CLUSTER,)}
FACTS = (EVERYTHING, sample_facts(current={}, custom_step=False))


def rows() -> dict[str, dict[str, tuple[list[str], str]]]:
    """Rows of the tables of choices: by strategy and choice, where it is legal and what it needs."""
    found: dict[str, dict[str, tuple[list[str], str]]] = {}
    for part in PAGE.split("## [")[1:]:
        table = part.split("| choice | numerics |", 1)[-1] if "| choice | numerics |" in part else ""
        found[part.partition("]")[0]] = {
            cells[0]: (cells[2].split(", ") if cells[2] else [], cells[3])
            for line in table.splitlines()[2:]
            if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split(" |")]) == 4
        }
    return found


ROWS = rows()
each = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


@each
def test_every_strategy_has_choices_and_each_is_legal_somewhere(strategy: object) -> None:
    found = ROWS[strategy.name]  # type: ignore[attr-defined]
    assert found
    nowhere = [label for label, (machines, _) in found.items() if not machines]
    assert not nowhere


@pytest.mark.parametrize("machine", OTHERS)
@pytest.mark.parametrize("facts", FACTS, ids=["tiny", "sample"])
def test_what_is_legal_for_other_workloads_is_legal_on_the_page(machine: str, facts: WorkloadFacts) -> None:
    """Where the page has the choice at all: counts of workers and micro-batches depend on cores and batches."""
    wrong, seen = [], 0
    for environment in OTHERS[machine]:
        for strategy in STRATEGIES:
            for choice in strategy.choices(environment, facts):
                label = choice_label(strategy.difference(choice, facts) or {"": ""})
                legal = strategy.supports(choice, environment, facts) == Supported()
                if legal and label in ROWS[strategy.name]:
                    seen += 1
                    if machine not in ROWS[strategy.name][label][0] and not _is_a_count(label):
                        wrong.append((strategy.name, label))
    assert seen > 15
    assert not wrong


def _is_a_count(label: str) -> bool:
    return bool(re.match(r"num_|factor=|bucket_|pipeline=|tensor=|expert=", label))


def test_no_optimizer_of_torch_is_said_to_lack_what_it_has() -> None:
    refused = set(re.findall(r"(\w+) does not support capturable=True", PAGE))
    for name in refused:
        assert "capturable" not in inspect.signature(getattr(torch.optim, name)).parameters
    for facts in WORKLOADS:
        cls = getattr(torch.optim, facts.optimizer.name)
        offered = inspect.signature(cls).parameters
        assert facts.optimizer.capturable == ("capturable" in offered or cls is torch.optim.SGD)
        assert set(facts.optimizer.implementations) <= {"for_loop", *offered}


@pytest.mark.parametrize("environment", MACHINES.values(), ids=MACHINES)
def test_the_command_refuses_nothing_that_a_typical_workload_can_have(environment: Environment) -> None:
    for strategy in STRATEGIES:
        row = _row(strategy, environment, WORKLOADS)
        listed = {choice_label(entry["choice"]) for entry in row["choices"]}
        refused = {choice_label(entry["choice"]) for entry in row["unsupported"]}
        assert not listed & refused
        for facts in WORKLOADS:
            for choice in strategy.choices(environment, facts):
                difference = strategy.difference(choice, facts)
                if difference:
                    legal = strategy.supports(choice, environment, facts) == Supported()
                    assert choice_label(difference) in (listed if legal else listed | refused)


def test_a_page_made_from_a_workload_without_masks_and_ranks_would_be_noticed() -> None:
    """The fixture that this replaced: one machine of one rank, an optimizer whose capturable form was not filled in."""
    poor = replace(
        WORKLOADS[1],
        model=replace(WORKLOADS[1].model, mask_refusal="not inspected"),
        optimizer=replace(WORKLOADS[1].optimizer, capturable=False),
    )
    refused = {
        strategy.name
        for strategy in STRATEGIES
        if not _row(strategy, sample_environment("cuda", num_ranks=1), [poor])["choices"]
    }
    assert {"attention_mask", "cuda_graph", "parallel_mesh", "ddp_buckets"} <= refused
