"""Faults of a script that 16 bits, an unused bound, or a model beside the trained one would hide, and correct changes.

A small loop runs the guarded steps in this process, with the marks that the hooks of a script would make.
"""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_loops import FP32, Bench, failed
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from steptune.tuner.scripts.agent.guard_watch import GuardWatch


class Excessive(nn.Linear):
    """Layer whose outputs are a little too large in 16 bits alone."""

    excess = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return outputs * self.excess if outputs.dtype == torch.bfloat16 else outputs


class Net(nn.Module):
    """Net with dropout that is called as a function, and a norm with running statistics."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.first, self.norm = Excessive(12, 24), nn.BatchNorm1d(24, momentum=loop.momentum)
        self.last, self.rate = nn.Linear(24, 5), loop.dropout
        self.first.excess, self.checkpoints = loop.excess, loop.checkpoints

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        if self.checkpoints is None:
            return self._rest(hidden)
        return checkpoint(self._rest, hidden, use_reentrant=self.checkpoints)  # type: ignore[no-any-return]

    def _rest(self, hidden: torch.Tensor) -> torch.Tensor:
        dropped = functional.dropout(functional.gelu(hidden), self.rate, self.training)
        return self.last(dropped)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Loop:
    """Loop that accumulates two batches, clips, follows a schedule and averages its weights; each part may be wrong.

    Attributes:
        checkpoints: Whether checkpoints are re-entrant; None without any.
        clears_every: Number of steps after which gradients are cleared.
        wastes: Whether the model is called once more in each step, for an output that nothing uses.
    """

    dtype: torch.dtype | None = None
    excess: float = 1.0
    momentum: float = 0.1
    dropout: float = 0.1
    weight: float = 1.0
    bound: float | None = 1e3
    num_schedules: int = 1
    decay: float = 0.99
    averages_with: str = "lerp"
    averages_every: int = 1
    fused: bool = False
    checkpoints: bool | None = None
    clears_every: int = 1
    wastes: bool = False

    def run(self, guard: GuardWatch) -> None:
        torch.manual_seed(0)
        model = Net(self)
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=self.fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        guard.made_optimizer(optimizer, 0)
        generator = torch.Generator().manual_seed(1)
        number = 0
        while not guard.over:
            number += 1
            for _ in range(2):
                inputs = torch.randn(16, 12, generator=generator)
                labels = inputs[:, :5].argmax(1)
                guard.called(model)
                with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                    outputs = model(inputs)
                    if self.wastes:
                        model(inputs)
                loss = functional.cross_entropy(outputs.float(), labels)
                guard.loss(loss)
                (self.weight * loss / 2).backward()
            if self.bound:
                nn.utils.clip_grad_norm_(model.parameters(), self.bound)
            optimizer.step()
            guard.step_ended(None)
            if number % self.clears_every == 0:
                optimizer.zero_grad()
            for _ in range(self.num_schedules):
                schedule.step()
            if number % self.averages_every == 0:
                self._average(average, model)

    def _average(self, average: nn.Module, model: nn.Module) -> None:
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                if self.averages_with == "lerp":
                    ours.lerp_(theirs, 1 - self.decay)
                else:
                    ours.mul_(self.decay).add_(theirs, alpha=1 - self.decay)


@pytest.fixture(scope="module", params=[Loop(), Loop(dtype=torch.bfloat16)], ids=["fp32", "bf16"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("layers"), request.param)


SAME: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bf16": {"dtype": torch.bfloat16},
    "fused": {"fused": True},
    "bf16 and fused": {"dtype": torch.bfloat16, "fused": True},
    "another form of the average": {"averages_with": "mul and add"},
    "checkpoints": {"checkpoints": False},
    "re-entrant checkpoints": {"checkpoints": True},
}


@pytest.mark.parametrize("change", SAME)
def test_a_correct_change_passes_every_layer(bench: Bench, change: str) -> None:
    verdict = bench.verdict(replace(bench.own, **SAME[change]))
    assert verdict.passed, verdict.reason
    assert {"calls", "average", "update", "gradient", "state"} <= {check.kind for check in verdict.checks}


def test_a_change_of_precision_is_compared_in_fp32_as_well(bench: Bench) -> None:
    verdict = bench.verdict(replace(bench.own, dtype=torch.bfloat16))
    kinds = {check.kind for check in verdict.checks}
    assert ("output" in kinds) == (bench.own.dtype is None)
    assert ("twin" in kinds) == (bench.own.dtype is None)
    assert any("compared in FP32" in note for note in verdict.notes) == (bench.own.dtype is not None)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "an average that lags": ({"decay": 0.995}, "averages"),
    "an average at every second step": ({"averages_every": 2}, "averages"),
    "a rate of dropout": ({"dropout": 0.12}, "calls"),
    "no dropout": ({"dropout": 0.0}, "calls"),
    "no clipping": ({"bound": None}, "calls"),
    "another bound": ({"bound": 2e3}, "calls"),
    "gradients cleared at every second step": ({"clears_every": 2}, "gradients"),
    "a schedule that is stepped twice": ({"num_schedules": 2}, "calls"),
    "statistics that follow faster": ({"momentum": 0.12}, "untrained state"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rejected_by_its_layer_in_16_bits(bench: Bench, fault: str) -> None:
    changes, name = FAULTS[fault]
    assert name in failed(bench.verdict(replace(bench.own, dtype=torch.bfloat16, **changes)))


def test_tensors_that_wait_for_the_collector_hide_no_average(bench: Bench) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself, self.weight = self, torch.zeros(5, 24)

    gc.disable()
    try:
        for _ in range(1000):
            Cycle()
        assert "averages" in failed(bench.verdict(replace(bench.own, decay=0.995)))
    finally:
        gc.enable()


def test_a_layer_that_is_wrong_in_16_bits_alone_shows_in_its_outputs(bench: Bench) -> None:
    if bench.own.dtype is None:
        assert "outputs of modules" in failed(bench.verdict(replace(bench.own, dtype=torch.bfloat16, excess=1.02)))


def test_a_layer_of_the_user_s_that_rounds_more_than_once_rejects_nothing(bench: Bench, tmp_path: Path) -> None:
    """Its outputs are as far from FP32 with today's settings."""
    if bench.own.dtype is not None:
        loose = replace(bench.own, excess=1.02)
        own = Bench(tmp_path, loose)
        assert own.verdict(replace(loose, fused=True)).passed


def test_a_loss_that_weighs_a_little_more_shows_where_precision_is_taken_back(bench: Bench) -> None:
    if bench.own.dtype is None:
        assert "gradients in FP32" in failed(bench.verdict(replace(bench.own, dtype=torch.bfloat16, weight=1.01)))


def test_gradients_that_are_cleared_at_every_second_step_are_no_turned_decisions(bench: Bench) -> None:
    """Only one of the three steps from the reference's weights has them."""
    assert "gradients" in failed(bench.verdict(replace(bench.own, clears_every=2)))


def test_a_model_that_is_called_for_nothing_trains_the_same(tmp_path: Path) -> None:
    """Its dropout drops nothing that any loss depends on; without running statistics the call leaves no trace."""
    bench = Bench(tmp_path, Loop(momentum=0.0), (FP32,))
    verdict = bench.verdict(replace(bench.own, wastes=True))
    assert verdict.passed, verdict.reason
    assert "calls" in failed(bench.verdict(replace(bench.own, wastes=True, dropout=0.12)))
