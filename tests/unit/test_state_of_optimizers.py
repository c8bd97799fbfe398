"""Optimizers whose state is there before the first update, as that of Adagrad is in PyTorch 2.11."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from steptune.tuner.errors import CaptureError
from steptune.tuner.scripts.agent.guard_watch import GuardWatch
from steptune.tuner.training.step_state import initial_state


class EagerAdagrad(torch.optim.Optimizer):
    """Adagrad without the check that a parameter's state exists."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, 0.5)

    def _init_group(self, group: dict[str, Any], sums: list[torch.Tensor]) -> None:
        sums.extend(self.state[parameter]["sum"] for parameter in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                total = self.state[parameter]["sum"]
                total.addcmul_(parameter.grad, parameter.grad)
                parameter.addcdiv_(parameter.grad, total.sqrt(), value=-group["lr"])


def test_a_guarded_loop_restarts_with_the_state_that_it_began_with(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = EagerAdagrad(model.parameters())
    settings = {
        "reference": None,
        "seed": 0,
        "steps": 1,
        "audits": 2,
        "wide": 0,
        "outputs": False,
        "disturb": 0.0,
        "noise": 0,
    }
    guard = GuardWatch(settings, tmp_path / "seen", (0,))
    guard.made_optimizer(optimizer, 0)
    batch, weights = torch.ones(4, 3), []
    for _ in range(3):
        guard.called(model)
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        weights.append(model.weight.detach().clone())
        guard.step_ended(None)
    assert guard.over  # which gives dropout and the hooks of optimizers back
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    torch.testing.assert_close(weights[0], weights[2], rtol=0, atol=0)


def test_a_state_that_cannot_be_made_again_is_refused() -> None:
    optimizer = EagerAdagrad(torch.nn.Linear(3, 2).parameters())
    with pytest.raises(CaptureError, match="'sum' in its constructor"):
        initial_state(optimizer)
    assert all("sum" in state for state in optimizer.state.values())
