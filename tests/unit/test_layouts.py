"""Parameters of every layout under every optimizer and implementation: the same training, and checkpoints that move."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_workloads import Everything
from torch import nn

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.strategies.memory_format.strategy import to_channels_last
from steptune.tuner.strategies.optimizer_algorithm.strategy import ALGORITHMS
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.casting import cast_model
from steptune.tuner.training.flat_parameters import ELEMENT_WISE
from steptune.tuner.training.initial_state import build_initialised, save_initial_state
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.layouts import is_dense
from steptune.tuner.training.optimizer_state import with_flags
from steptune.tuner.training.plan import OptimizerArguments, Plan

SAME = {"rtol": 1e-4, "atol": 1e-5}
"""Some updates of at most 0.01 each; a state in another layout moves weights by several of them."""

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
OF_TORCH = (*ELEMENT_WISE, "Adafactor")
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}


def contiguous(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous()


def last(value: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return value.contiguous(memory_format=formats.get(value.dim(), torch.contiguous_format))


def transposed(value: torch.Tensor) -> torch.Tensor:
    return value if value.dim() < 2 else value.transpose(0, 1).contiguous().transpose(0, 1)


def gapped(value: torch.Tensor) -> torch.Tensor:
    """Every second element of a larger tensor."""
    return torch.stack([value, torch.full_like(value, 9.0)], -1)[..., 0]


LAYOUTS = {"contiguous": contiguous, "channels_last": last, "transposed": transposed, "gapped": gapped}


class Net(nn.Module):
    """Two- and three-dimensional convolutions and a matrix, each element of which has another history."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Conv2d(3, 4, 3)
        self.deep = nn.Conv3d(2, 3, 2)
        self.head = nn.Linear(7, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.flat(images).tanh()
        y = self.deep(x.reshape(-1, 2, 2, *x.shape[-2:])).tanh().mean((2, 3, 4))
        return self.head(torch.cat([x.mean((2, 3)), y], 1))


class Laid(Everything):
    def __init__(self, cls: str = "AdamW", layout: str = "contiguous", **options: Any) -> None:
        self._class, self._layout, self._options = cls, layout, {**OPTIONS.get(cls, {}), **options}

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = Net()
        for parameter in model.parameters():
            parameter.data = LAYOUTS[self._layout](parameter.data)
        return model

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, self._class)([p for _, p in named_parameters], lr=1e-2, **self._options)


def build(workload: Laid, transforms: Any = (), **arguments: Any) -> TrainingJob:
    plan = Plan(model=list(transforms), optimizer=OptimizerArguments(**arguments))
    return assemble(workload, plan, device=torch.device("cpu"))


def trained(job: TrainingJob, count: int = 3) -> None:
    for batch in list(job)[:count]:
        job.step(batch)


def assert_same(first: TrainingJob, second: TrainingJob, **tolerance: float) -> None:
    for (name, a), (_, b) in zip(first.whole_parameters(), second.whole_parameters(), strict=True):
        torch.testing.assert_close(a, b, **(tolerance or SAME), msg=lambda message, name=name: f"{name}: {message}")


def ways(cls: str) -> list[dict[str, Any]]:
    """Settings that the class has."""
    found: list[dict[str, Any]] = [{"implementation": name} for name in ("for_loop", "foreach")]
    found += [{"implementation": "fused"}] if cls in FUSED else []
    return found + ([{**way, "contiguous": True} for way in found] if cls in ELEMENT_WISE else [])


CASES = [(cls, layout, way) for cls in OF_TORCH for layout in LAYOUTS for way in ways(cls)]


@pytest.mark.parametrize(("cls", "layout", "way"), CASES, ids=str)
def test_a_plain_checkpoint_goes_on_in_every_layout_and_implementation(
    cls: str, layout: str, way: dict[str, Any]
) -> None:
    """A plain loop over contiguous parameters is what the others are compared with, and where they go back."""
    plain = build(Laid(cls), implementation="for_loop")
    trained(plain)
    model, state = copy.deepcopy((plain.state_dict(), plain.optimizer_state_dict()))
    if layout == "gapped" and way == {"implementation": "fused"}:
        with pytest.raises(UnsupportedError, match="without gaps in memory"):
            build(Laid(cls, layout), **way)
        return
    other = build(Laid(cls, layout), **way)
    other.model.load_state_dict(model)
    other.load_optimizer_state_dict(copy.deepcopy(state))
    trained(plain)
    trained(other)
    assert_same(plain, other)
    back = build(Laid(cls), implementation="for_loop")
    back.model.load_state_dict(other.state_dict())
    back.load_optimizer_state_dict(copy.deepcopy(other.optimizer_state_dict()))
    trained(plain)
    trained(back)
    assert_same(plain, back)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_another_algorithm_s_checkpoint_too(algorithm: str, layout: str) -> None:
    def job(layout: str) -> TrainingJob:
        return build(Laid("SGD", layout), algorithm=algorithm)

    plain = job("contiguous")
    trained(plain)
    other = job(layout)
    other.model.load_state_dict(plain.state_dict())
    other.load_optimizer_state_dict(copy.deepcopy(plain.optimizer_state_dict()))
    trained(plain)
    trained(other)
    assert_same(plain, other)


class TestChannelsLast:
    """The user's contiguous parameters, turned by the plan."""

    @pytest.mark.parametrize("way", ways("AdamW"), ids=str)
    def test_what_is_saved_has_the_user_s_own_layout(self, way: dict[str, Any]) -> None:
        """The user's own fused optimizer would not check either."""
        job = build(Laid(), [to_channels_last], **way)
        trained(job)
        workload = Laid(fused=True)
        model = workload.model()
        own = workload.optimizer(model.named_parameters())
        model.load_state_dict(job.state_dict())
        saved = job.optimizer_state_dict()
        own.load_state_dict(with_flags(copy.deepcopy(saved), [{"fused": True}]))
        for batch in list(job)[:3]:
            own.zero_grad()
            workload.loss(model, batch).backward()
            own.step()
            job.step(batch)
        for (_, ours), theirs in zip(job.whole_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, **SAME)

    def test_what_is_loaded_into_the_optimizer_itself_is_laid_out_as_well(self) -> None:
        plain, fused = build(Laid(), implementation="for_loop"), build(Laid(fused=True), [to_channels_last])
        trained(plain)
        fused.model.load_state_dict(plain.state_dict())
        state = copy.deepcopy(plain.optimizer.state_dict())
        fused.optimizer.load_state_dict(with_flags(state, [{"fused": True}]))
        trained(plain)
        trained(fused)
        assert_same(plain, fused)

    def test_masters_have_the_layout_of_their_parameters(self) -> None:
        def job(*transforms: Any, implementation: str) -> TrainingJob:
            plan = Plan(
                model=list(transforms),
                cast=[lambda model, workload: cast_model(model, "bfloat16", keep_fp32=True)],
                optimizer=OptimizerArguments(master_weights=True, implementation=implementation),
            )
            return assemble(Laid(), plan, device=torch.device("cpu"))

        plain, fused = job(implementation="for_loop"), job(to_channels_last, implementation="fused")
        trained(plain)
        fused.model.load_state_dict(plain.state_dict())
        for (_, ours), (_, theirs) in zip(fused.updated_parameters(), plain.updated_parameters(), strict=True):
            ours.data.copy_(theirs)
        fused.load_optimizer_state_dict(copy.deepcopy(plain.optimizer_state_dict()))
        trained(plain, 1)
        trained(fused, 1)
        assert_same(plain, fused, rtol=1e-3, atol=2e-3)  # gradients of 16 bits move Adam's steps a little


class Stepping(Laid):
    """A step of the user's own, whose gradients have a layout of their own."""

    def training_step(self, job: Any, batch: Any) -> torch.Tensor:
        loss = self.loss(job.model, batch)
        parameters = list(job.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient.contiguous()
        job.optimizer.step()
        return loss


def test_gradients_that_a_step_of_the_user_s_own_makes_get_the_layout_of_their_parameters() -> None:
    plain, fused = (
        build(Stepping(layout=layout), implementation=name)
        for layout, name in (("contiguous", "for_loop"), ("channels_last", "fused"))
    )
    trained(plain)
    trained(fused)
    assert_same(plain, fused)


def test_a_trial_starts_with_the_layouts_of_the_user_s_own_model(tmp_path: Any) -> None:
    for layout in ("contiguous", "channels_last", "transposed"):
        own = Laid(layout=layout).model()
        save_initial_state(own, tmp_path / "state")
        built = build_initialised(Laid(layout=layout).model, tmp_path / "state")
        for ours, theirs in zip(built.parameters(), own.parameters(), strict=True):
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (torch.zeros(3, 1, 4)[:, :, ::2], False),
        (torch.zeros(4, 1).expand(4, 3), False),
        (torch.zeros(6, 4)[::6], True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
    ],
)
def test_only_memory_without_holes_is_dense(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense
