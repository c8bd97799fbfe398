"""torch.compile on a device: every block in both modes of training, CUDA graphs of regions, and what was given up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from tiny_workloads import AttentionBlock, Everything
from torch import nn
from torch.utils.data import TensorDataset
from trial_builders import prepare, reference

import steptune
from steptune.tuner.hardware import find_compiler
from steptune.tuner.records import Candidate
from steptune.tuner.strategies import strategy_named
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.compilation import compilation, watch_compilation
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.plan import OptimizerArguments, Plan
from steptune.tuner.workloads.workload import Workload

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_compiler() is None, reason="torch.compile needs a C++ compiler here"),
]
DEVICE = torch.device("cuda", 0)
COMPILE = strategy_named("compile")
NUM_BLOCKS = 12
STEPS = 6


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TorchDynamo as in a new process."""
    from torch._dynamo.utils import clear_compilation_metrics, counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    config = torch._dynamo.config
    limits = config.recompile_limit, config.accumulated_recompile_limit
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    watch_compilation()
    yield
    torch._dynamo.reset()
    config.recompile_limit, config.accumulated_recompile_limit = limits


class NumberedBlock(AttentionBlock):
    """Knows its number, as blocks of language models do for their cache."""

    def __init__(self, number: int) -> None:
        super().__init__(32, 2, dropout=0.1)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-6 * self.number


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NumberedBlock(number) for number in range(NUM_BLOCKS))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


class Numbered(steptune.Workload):
    global_batch = 8

    def model(self) -> nn.Module:
        return Stack()

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(32, 16, 32, generator=generator), torch.arange(32) % 4)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, labels = batch
        return F.cross_entropy(model(x), labels)


def trained(workload: Workload, choice: dict[str, Any] | None) -> tuple[list[float], TrainingJob]:
    plan = Plan(optimizer=OptimizerArguments(implementation="fused"))
    if choice is not None:
        COMPILE.contribute(plan, choice)
    torch.manual_seed(0)
    job = assemble(workload, plan, device=DEVICE)
    batches = list(job.loader)
    job.model.eval()  # as the guard does first
    losses = [float(job.step(batches[number % len(batches)])) for number in range(STEPS)]
    job.model.train()
    for number in range(STEPS):
        job.step(batches[number % len(batches)])
    return losses, job


def test_blocks_that_know_their_number_are_all_compiled_for_training_too() -> None:
    """The default limit of eight variants was used up by evaluation mode, so that what was measured ran as it is."""
    choice = {"mode": "default", "scope": "regional", "dynamic": None}
    eager, _ = trained(Numbered(), None)
    losses, job = trained(Numbered(), choice)
    found = compilation()
    assert found is not None
    assert found.num_given_up == 0
    assert found.num_graphs >= 2 * NUM_BLOCKS
    effect = COMPILE.took_effect(COMPILE.evidence(job), choice)
    assert effect.took, effect.detail
    assert losses == pytest.approx(eager, rel=1e-3)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_train_alike_and_take_effect(mode: str) -> None:
    choice = {"mode": mode, "scope": "whole", "dynamic": None}
    eager, _ = trained(Everything(), None)
    losses, job = trained(Everything(), choice)
    effect = COMPILE.took_effect(COMPILE.evidence(job), choice)
    assert effect.took, effect.detail
    assert losses == pytest.approx(eager, rel=5e-3)


def test_a_model_that_is_compiled_in_every_step_has_no_effect(tmp_path: Path) -> None:
    """And says so in the trial, with the guard that failed."""
    prepared = prepare(reference("uncapturable", "Counts"), tmp_path, with_reference=False, device="cuda")
    try:
        candidate = Candidate(choices={"compile": {"mode": "default"}})
        (result,) = prepared.run(prepared.spec(candidate, device="cuda", guard=False, profile=False))
    finally:
        prepared.runner.close()
    assert result.ok, result.failure
    (effect,) = (e for e in result.effects if e.strategy == "compile")
    assert not effect.took
    assert "num_steps" in effect.detail
    assert result.compilation is not None
    assert result.compilation.num_given_up > 0
