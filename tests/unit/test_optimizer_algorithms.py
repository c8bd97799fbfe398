"""LAMB, LARS and SM3 against slow references, and the exchange of a workload's optimizer for another."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import slow_optimizers
import torch
from tiny_workloads import Everything
from torch import nn

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.optimizers.exchange import CLASSES, exchanged
from steptune.tuner.training.optimizers.lamb import Lamb
from steptune.tuner.training.optimizers.lars import Lars
from steptune.tuner.training.optimizers.sm3 import Sm3
from steptune.tuner.training.plan import OptimizerArguments, Plan

SHAPES = ((3, 4), (5,), (2, 6), (7,), (4, 1))
NUM_STEPS = 6
DOUBLE = {"rtol": 1e-12, "atol": 1e-14}
"""Sums of a handful of float64 numbers in another order."""


def parameters(dtype: torch.dtype = torch.float64, zero: int | None = None) -> list[nn.Parameter]:
    """One of each shape, seeded; the numbered one is all zeros."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    if zero is not None:
        made[zero].zero_()
    return [nn.Parameter(p.to(dtype)) for p in made]


def gradients(step: int) -> list[torch.Tensor]:
    """Gradients of different sizes for different parameters; the first row of the first matrix never has one."""
    generator = torch.Generator().manual_seed(100 + step)
    made = [10.0**k * torch.randn(shape, generator=generator, dtype=torch.float64) for k, shape in enumerate(SHAPES)]
    made[0][0] = 0.0
    return made


OPTIMIZERS: dict[
    str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., slow_optimizers.Step], dict[str, Any]]
] = {
    "lamb": (Lamb, slow_optimizers.lamb, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "lars": (Lars, slow_optimizers.lars, {"lr": 3.0, "momentum": 0.9, "weight_decay": 0.01, "trust": 0.02}),
    "sm3": (Sm3, slow_optimizers.sm3, {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.02}),
    "sm3 with momentum": (Sm3, slow_optimizers.sm3, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}),
}
each = pytest.mark.parametrize("name", OPTIMIZERS)


def grouped(made: list[nn.Parameter], **second: Any) -> list[dict[str, Any]]:
    """Two groups: the first two parameters, and the others with options of their own."""
    return [{"params": made[:2]}, {"params": made[2:], **second}]


@each
class TestAgainstTheReference:
    @pytest.mark.parametrize("zero", [None, 2])
    def test_every_step_of_every_parameter_agrees(self, name: str, zero: int | None) -> None:
        """Matrices and vectors, several groups with other rates and decays, gradients and weights of zero."""
        make, reference, options = OPTIMIZERS[name]
        other = {"lr": 0.5 * options["lr"], "weight_decay": 3 * options["weight_decay"]}
        made = parameters(zero=zero)
        optimizer = make(grouped(made, **other), **options)
        steps = [reference(**(options if k < 2 else {**options, **other})) for k in range(len(made))]
        expected = [p.detach().clone() for p in made]
        for number in range(NUM_STEPS):
            for k, gradient in enumerate(gradients(number)):
                made[k].grad = gradient
                expected[k] = steps[k](expected[k], gradient)
            optimizer.step()
            for found, wanted in zip(made, expected, strict=True):
                torch.testing.assert_close(found.detach(), wanted, **DOUBLE)

    def test_gradients_stay_as_they_are(self, name: str) -> None:
        make, _, options = OPTIMIZERS[name]
        made = parameters()
        optimizer = make(made, **options)
        for p, gradient in zip(made, gradients(0), strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        for p, gradient in zip(made, gradients(0), strict=True):
            assert torch.equal(p.grad, gradient)

    def test_a_parameter_without_a_gradient_is_left_alone(self, name: str) -> None:
        """And catches up with its own count of steps: bias corrections are each parameter's own."""
        make, reference, options = OPTIMIZERS[name]
        made = parameters()
        optimizer = make(made, **options)
        before = made[3].detach().clone()
        step, expected = reference(**options), made[1].detach().clone()
        for number in range(3):
            for k, gradient in enumerate(gradients(number)):
                made[k].grad = None if k == 3 or (k == 1 and number == 1) else gradient
            if number != 1:
                expected = step(expected, gradients(number)[1])
            optimizer.step()
        assert torch.equal(made[3].detach(), before)
        assert made[3] not in optimizer.state
        torch.testing.assert_close(made[1].detach(), expected, **DOUBLE)

    def test_goes_on_from_a_saved_state(self, name: str) -> None:
        make, _, options = OPTIMIZERS[name]
        made = parameters()
        optimizer = make(grouped(made, lr=0.3), **options)
        self.run(optimizer, made, range(3))
        again = [nn.Parameter(p.detach().clone()) for p in made]
        loaded = make(grouped(again, lr=0.9), **options)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert [group["lr"] for group in loaded.param_groups] == [options["lr"], 0.3]
        self.run(optimizer, made, range(3, 6))
        self.run(loaded, again, range(3, 6))
        for found, wanted in zip(again, made, strict=True):
            assert torch.equal(found, wanted)

    def run(self, optimizer: torch.optim.Optimizer, made: list[nn.Parameter], steps: range) -> None:
        for number in steps:
            for p, gradient in zip(made, gradients(number), strict=True):
                p.grad = gradient.to(p.dtype)
            optimizer.step()

    def test_sixteen_bit_parameters_stay_finite_and_near(self, name: str) -> None:
        """bfloat16 has eight bits, for states too: six steps of as many roundings each differ by some per cent."""
        make, _, options = OPTIMIZERS[name]
        wide, narrow = parameters(), parameters(torch.bfloat16)
        for made in (wide, narrow):
            self.run(make(made, **options), made, range(NUM_STEPS))
        for found, wanted in zip(narrow, wide, strict=True):
            assert float(((found.double() - wanted).norm() / wanted.norm()).detach()) < 0.1

    def test_learns_a_small_problem(self, name: str) -> None:
        """Least squares of a network of two layers; the loss falls to a tenth within 200 steps.

        The rate of LARS is that of matrices; as it is, it would be far too large for vectors.
        """
        make, _, _ = OPTIMIZERS[name]
        options = {"lamb": {"lr": 0.02, "weight_decay": 0.0}, "lars": {"lr": 10.0, "weight_decay": 0.0}}
        vector_rate = {"lars": 0.05}
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        x = torch.randn(64, 6)
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], 1)
        chosen = options.get(name, {"lr": 0.1, "momentum": OPTIMIZERS[name][2].get("momentum", 0.0)})
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "lr": vector_rate.get(name, chosen["lr"])},
        ]
        optimizer = make(groups, **chosen)
        losses = []
        for _ in range(200):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.1 * losses[0]

    def test_a_complex_parameter_is_refused(self, name: str) -> None:
        make, _, options = OPTIMIZERS[name]
        parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ValueError, match="complex parameters are not supported"):
            make([parameter], **options).step()

    def test_a_sparse_gradient_is_refused(self, name: str) -> None:
        make, _, options = OPTIMIZERS[name]
        embedding = nn.Embedding(4, 3, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match="sparse=False"):
            make(embedding.parameters(), **options).step()


class TestOptions:
    @pytest.mark.parametrize("make", [Lamb, Lars, Sm3])
    def test_a_negative_rate_is_refused(self, make: Callable[..., Any]) -> None:
        with pytest.raises(ValueError, match=r"lr must be at least 0, got -1.0$"):
            make(parameters(), lr=-1)

    def test_a_decay_of_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"betas\[1\] must be at least 0 and below 1, got 1.0"):
            Lamb(parameters(), betas=(0.9, 1.0))

    @pytest.mark.parametrize(("make", "reference"), [(Lamb, slow_optimizers.lamb), (Lars, slow_optimizers.lars)])
    def test_vectors_can_be_treated_as_matrices(self, make: Callable[..., Any], reference: Callable[..., Any]) -> None:
        options = next(o for m, _, o in OPTIMIZERS.values() if m is make)
        (vector,) = [nn.Parameter(p.detach()) for p in parameters() if p.shape == (7,)]
        step, expected = reference(**options, exclude_vectors=False), vector.detach().clone()
        optimizer = make([vector], **options, exclude_vectors=False)
        for number in range(3):
            vector.grad = gradients(number)[3]
            expected = step(expected, gradients(number)[3])
            optimizer.step()
        torch.testing.assert_close(vector.detach(), expected, **DOUBLE)

    def test_a_closure_is_evaluated_with_gradients(self) -> None:
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = Sm3([weight])

        def closure() -> Any:
            loss = weight.square().sum()
            loss.backward()
            return loss.detach()

        assert float(optimizer.step(closure)) == 4.0
        assert float(weight.detach().max()) < 1.0


def state_elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))


class TestMemory:
    """State of a matrix of 64 x 48 and a vector of 48; each has a counter of steps where the class keeps one."""

    def elements(self, make: Callable[..., torch.optim.Optimizer], **options: Any) -> int:
        made = [nn.Parameter(torch.ones(64, 48)), nn.Parameter(torch.ones(48))]
        for p in made:
            p.grad = torch.ones_like(p)
        optimizer = make(made, **options)
        optimizer.step()
        return state_elements(optimizer)

    def test_sm3_keeps_rows_and_columns(self) -> None:
        assert self.elements(Sm3) == 64 + 48 + 48

    def test_adafactor_keeps_rows_and_columns(self) -> None:
        assert self.elements(torch.optim.Adafactor) == 64 + 48 + 48 + 2

    def test_momentum_costs_sm3_as_much_as_the_parameters(self) -> None:
        assert self.elements(Sm3, momentum=0.9) == 64 + 48 + 48 + (64 * 48 + 48)

    def test_lars_keeps_one_and_lamb_two_numbers_for_each(self) -> None:
        assert self.elements(Lars) == 64 * 48 + 48
        assert self.elements(Lamb) == 2 * (64 * 48 + 48) + 2


class Groups(Everything):
    """Two groups of AdamW, one with half of the rate and a name of its own."""

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        return torch.optim.AdamW(
            [
                {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.3, "name": "matrices"},
                {"params": [p for _, p in named if p.dim() <= 1], "lr": 5e-4},
            ],
            lr=1e-3,
            weight_decay=0.0,
            betas=(0.8, 0.99),
        )


def job_with(algorithm: str, workload: Any = None, **arguments: Any) -> Any:
    plan = Plan(optimizer=OptimizerArguments(algorithm=algorithm, **arguments))
    return assemble(workload or Groups(), plan, device=torch.device("cpu"))


class TestExchange:
    @pytest.mark.parametrize("algorithm", CLASSES)
    def test_keeps_groups_rates_and_keys_of_the_users_own(self, algorithm: str) -> None:
        job = job_with(algorithm)
        first, second = job.optimizer.param_groups
        assert type(job.optimizer) is CLASSES[algorithm]
        assert (first["lr"], second["lr"]) == (1e-3, 5e-4)
        assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
        assert first["name"] == "matrices"
        assert len(first["params"]) + len(second["params"]) == len(list(job.model.parameters()))

    def test_takes_over_what_both_have(self) -> None:
        assert job_with("lamb").optimizer.param_groups[0]["betas"] == (0.8, 0.99)
        assert job_with("lamb").optimizer.param_groups[0]["eps"] == 1e-6

    @pytest.mark.parametrize(("momentum", "expected"), [(0.0, 0.9), (0.7, 0.7)])
    def test_plain_sgd_has_no_momentum_to_take_over(self, momentum: float, expected: float) -> None:
        sgd = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1, momentum=momentum)
        assert exchanged(sgd, "lars").param_groups[0]["momentum"] == expected

    @pytest.mark.parametrize(
        ("cls", "options", "algorithm"),
        [
            ("AdamW", {"maximize": True}, "lamb"),
            ("AdamW", {"maximize": True}, "lars"),
            ("SGD", {"maximize": True}, "sm3"),
            ("AdamW", {"differentiable": True}, "adafactor"),
            ("AdamW", {"amsgrad": True}, "lamb"),
            ("SGD", {"momentum": 0.9, "nesterov": True}, "lars"),
            ("SGD", {"momentum": 0.9, "dampening": 0.1}, "lars"),
        ],
    )
    def test_an_option_that_would_be_lost_is_refused_by_name(
        self, cls: str, options: dict[str, Any], algorithm: str
    ) -> None:
        """In any group; it would be another training than was asked for."""
        made = [{"params": [nn.Parameter(torch.ones(2, 2))]}, {"params": [nn.Parameter(torch.ones(2))], **options}]
        optimizer = getattr(torch.optim, cls)(made, lr=0.1, **{k: v for k, v in options.items() if k == "momentum"})
        name = next(option for option in options if option != "momentum")
        with pytest.raises(UnsupportedError, match=rf"{cls} has {name}=.*which {algorithm} does not support"):
            exchanged(optimizer, algorithm)

    @pytest.mark.parametrize("algorithm", ["adamw", "adafactor"])
    def test_maximising_goes_on_where_the_new_one_can(self, algorithm: str) -> None:
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = exchanged(torch.optim.SGD([weight], lr=0.1, weight_decay=0.0, maximize=True), algorithm)
        weight.grad = torch.ones(2, 2)
        optimizer.step()
        assert bool((weight > 1).all())

    def test_adam_s_amsgrad_goes_on_in_adamw(self) -> None:
        adam = torch.optim.Adam([nn.Parameter(torch.ones(2, 2))], amsgrad=True)
        assert exchanged(adam, "adamw").param_groups[0]["amsgrad"] is True

    def test_what_belongs_to_the_old_algorithm_goes_with_it(self) -> None:
        sgd = torch.optim.SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1, momentum=0.9, nesterov=True)
        assert "nesterov" not in exchanged(sgd, "adamw").param_groups[0]

    @pytest.mark.parametrize("arguments", [{"algorithm": "lamb"}, {"implementation": "foreach"}, {"contiguous": True}])
    @pytest.mark.parametrize("what", ["state", "hooks"])
    def test_an_optimizer_with_more_than_its_options_is_refused(self, what: str, arguments: dict[str, Any]) -> None:
        """Built again, it would begin anew, or without what its hooks do."""

        class Prepared(Groups):
            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                optimizer = super().optimizer(named_parameters)
                if what == "state":
                    for group in optimizer.param_groups:
                        for parameter in group["params"]:
                            parameter.grad = torch.zeros_like(parameter)
                    optimizer.step()
                else:
                    optimizer.register_step_pre_hook(lambda *_: None)
                return optimizer

        with pytest.raises(UnsupportedError, match=rf"Workload\.optimizer returns AdamW with {what}.*would be lost"):
            assemble(Prepared(), Plan(optimizer=OptimizerArguments(**arguments)), device=torch.device("cpu"))
        assemble(Prepared(), Plan(), device=torch.device("cpu"))

    def test_a_rate_that_the_workload_names_keeps_the_ratio_of_the_groups(self) -> None:
        class Named(Groups):
            learning_rates = {"lars": 4.0}  # noqa: RUF012

        assert [g["lr"] for g in job_with("lars", Named()).optimizer.param_groups] == [4.0, 2.0]
        assert [g["lr"] for g in job_with("lamb", Named()).optimizer.param_groups] == [1e-3, 5e-4]

    @pytest.mark.parametrize(("algorithm", "implementation"), [("lamb", "foreach"), ("adafactor", "fused")])
    def test_an_implementation_that_it_has_not_is_refused(self, algorithm: str, implementation: str) -> None:
        """Its groups would have said that it ran."""
        with pytest.raises(UnsupportedError, match=rf"has no {implementation} implementation"):
            job_with(algorithm, implementation=implementation)

    @pytest.mark.parametrize("arguments", [{"algorithm": "lars"}, {"rate_factor": 2.0}])
    def test_an_optimizer_without_a_rate_of_that_name_is_refused(self, arguments: dict[str, Any]) -> None:
        class Named(torch.optim.Optimizer):
            def __init__(self, parameters: Any) -> None:
                super().__init__(parameters, {"speed": 0.1})

        class Own(Everything):
            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                return Named([p for _, p in named_parameters])

        with pytest.raises(UnsupportedError, match=r"Named has a parameter group without lr \(it has: speed\)"):
            assemble(Own(), Plan(optimizer=OptimizerArguments(**arguments)), device=torch.device("cpu"))

    @pytest.mark.parametrize("arguments", [{"algorithm": "lars"}, {"rate_factor": 2.0}])
    def test_a_scheduler_with_rates_of_its_own_is_refused_where_the_rate_is_another(
        self, arguments: dict[str, Any]
    ) -> None:
        """The rate that was asked for would be overwritten before the first step."""

        class Cycled(Groups):
            learning_rates = {"lars": 4.0}  # noqa: RUF012

            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)

        device = torch.device("cpu")
        with pytest.raises(UnsupportedError, match=r"OneCycleLR starts with its own learning rate, 0\.004, instead"):
            assemble(Cycled(), Plan(optimizer=OptimizerArguments(**arguments)), device=device)
        assemble(Cycled(), Plan(optimizer=OptimizerArguments(algorithm="lamb")), device=device)

    def test_the_scheduler_moves_the_new_optimizer(self) -> None:
        class Decays(Groups):
            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1.0])

        job = job_with("sm3", Decays())
        for batch in list(job)[:2]:
            job.step(batch)
        assert [g["lr"] for g in job.optimizer.param_groups] == [pytest.approx(1e-3 / 4), 5e-4]

    @pytest.mark.parametrize("algorithm", CLASSES)
    def test_trains_with_masters_of_16_bit_parameters(self, algorithm: str) -> None:
        from steptune.tuner.training.casting import cast_model

        plan = Plan(
            cast=[lambda model, workload: cast_model(model, "bfloat16", keep_fp32=True)],
            optimizer=OptimizerArguments(algorithm=algorithm, master_weights=True),
        )
        job = assemble(Groups(), plan, device=torch.device("cpu"))
        assert all(math.isfinite(float(job.step(batch))) for batch in job)
        assert all(p.dtype == torch.float32 for g in job.optimizer.param_groups for p in g["params"])
