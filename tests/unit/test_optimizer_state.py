"""Checkpoints of optimizers between ways of running them: values, step counts, and how each goes on running."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_workloads import Everything

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.casting import cast_model
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.optimizer_state import with_flags
from steptune.tuner.training.plan import OptimizerArguments, Plan, StepArguments

ROUNDING = {"rtol": 1e-4, "atol": 1e-6}


class Groups(Everything):
    """Two groups; AdamW, whose state has a step count, SGD, whose has none, or NAdam, whose has one number more."""

    def __init__(self, cls: str = "AdamW") -> None:
        self._class = cls

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        nn = torch.nn
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 36, 4))

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() <= 1]},
        ]
        options = {"momentum": 0.9} if self._class == "SGD" else {}
        return getattr(torch.optim, self._class)(groups, lr=1e-2, **options)


def masters() -> Plan:
    return Plan(
        cast=[lambda model, workload: cast_model(model, "bfloat16", keep_fp32=True)],
        optimizer=OptimizerArguments(master_weights=True),
    )


PLANS = {
    "plain": Plan,
    "for_loop": lambda: Plan(optimizer=OptimizerArguments(implementation="for_loop")),
    "foreach": lambda: Plan(optimizer=OptimizerArguments(implementation="foreach")),
    "fused": lambda: Plan(optimizer=OptimizerArguments(implementation="fused")),
    "contiguous": lambda: Plan(optimizer=OptimizerArguments(contiguous=True)),
    "contiguous, fused": lambda: Plan(optimizer=OptimizerArguments(contiguous=True, implementation="fused")),
    "recorded": lambda: Plan(step=StepArguments(captured=True), optimizer=OptimizerArguments(capturable=True)),
    "masters": masters,
}


def job_of(name: str, cls: str = "AdamW") -> TrainingJob:
    return assemble(Groups(cls), PLANS[name](), device=torch.device("cpu"))


def trained(job: TrainingJob) -> list[float]:
    return [float(job.step(batch)) for batch in list(job)[:2]]


def flags_of(job: TrainingJob) -> list[tuple[Any, ...]]:
    return [tuple(g.get(name) for name in ("foreach", "fused", "capturable")) for g in job.optimizer.param_groups]


@pytest.mark.parametrize(
    ("cls", "saved", "loaded"),
    [
        (cls, saved, loaded)
        for cls in ("AdamW", "SGD", "NAdam")
        for saved in PLANS
        for loaded in PLANS
        if cls != "NAdam" or "fused" not in f"{saved} {loaded}"  # which it has not
    ],
)
def test_moves_between_all_and_each_goes_on_as_it_ran(saved: str, loaded: str, cls: str) -> None:
    first = job_of(saved, cls)
    trained(first)
    model, state = copy.deepcopy((first.state_dict(), first.optimizer_state_dict()))
    second, ran = job_of(loaded, cls), flags_of(job_of(loaded, cls))
    second.model.load_state_dict(model)
    second.parameters_set()
    second.load_optimizer_state_dict(state)
    assert flags_of(second) == ran
    again = second.optimizer_state_dict()
    assert again["param_groups"] == state["param_groups"]
    for number, values in state["state"].items():
        assert again["state"][number].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(again["state"][number][key], value, **ROUNDING)
    rel = 2e-2 if "masters" in (saved, loaded) else 1e-5
    assert trained(second) == pytest.approx(trained(first), rel=rel)


@pytest.mark.parametrize("name", PLANS)
def test_is_what_the_user_s_own_optimizer_saves_and_loads(name: str) -> None:
    """Keys, groups with the flags that the user wrote, and kinds of step counts."""
    workload = Groups()
    model = workload.model()
    own = workload.optimizer(model.named_parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    own.step()
    job = job_of(name)
    trained(job)
    found, expected = job.optimizer_state_dict(), own.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert {k: (v.shape, v.dtype, v.device) for k, v in found["state"][number].items()} == {
            k: (v.shape, v.dtype, v.device) for k, v in values.items()
        }
    own.load_state_dict(found)
    own.step()
    job.load_optimizer_state_dict(own.state_dict())


def test_step_counts_come_from_the_device_and_numbers_stay_numbers() -> None:
    """An update that is neither fused nor capturable would wait for each of them; a class of one's own may count in
    Python. The other device is one without storage.
    """

    class Elsewhere(torch.Tensor):
        moved = False

        def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor(3.0)

    on_device = torch.zeros(()).as_subclass(Elsewhere)
    state = {"state": {0: {"step": on_device}, 1: {"step": 3}, 2: {}}, "param_groups": [{"lr": 1.0, "fused": True}]}
    found = with_flags(state, [{"foreach": True}])
    assert type(found["state"][0]["step"]) is torch.Tensor
    assert float(found["state"][0]["step"]) == 3.0
    assert found["state"][1] == {"step": 3}
    assert found["state"][2] == {}
    assert found["param_groups"] == [{"lr": 1.0, "foreach": True}]


def test_another_number_of_groups_is_refused() -> None:
    state = job_of("plain").optimizer_state_dict()
    state["param_groups"].pop()
    for name in ("plain", "contiguous"):
        with pytest.raises(WorkloadRejectedError, match="state has 1 parameter groups, but the optimizer has 2"):
            job_of(name).load_optimizer_state_dict(state)
