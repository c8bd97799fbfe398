"""The replayed update: every way to compute the right one passes in every precision, and no other update does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import BF16, FP32, PROTOCOL, Study, make_study
from guarded_trainings import Fault
from guarded_unseen import UNSEEN, Pair
from guarded_updates import FAULTS, PRECISIONS, TRAININGS, BySGD, Updated, WarmAdamW
from msgspec.structs import replace

from steptune.tuner.guard.update_replay import LIMIT, RuleGroup, SeenStep, UpdateRule, worst_deviation
from steptune.tuner.training.flat_parameters import ELEMENT_WISE

UPDATE = "replayed update"
SHORT = replace(PROTOCOL, num_pointwise=4, num_curve=0, num_horizon=0, randomness="none", num_disturbed=1)
PLANTED = [
    pytest.param(training, planted, id=f"{training.__name__}-{fault}")
    for training in TRAININGS
    for fault, plant in FAULTS.items()
    if (planted := plant(training)) is not None
]
IMPLEMENTED = [
    pytest.param(training, implementation, id=f"{training.__name__}-{implementation}")
    for training in TRAININGS
    for implementation in ("for_loop", "foreach", "fused")
    if implementation != "fused" or training.kind is not torch.optim.RMSprop
]
SOME_OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9, "nesterov": True}, "RMSprop": {"centered": True}}


@pytest.fixture(scope="module", params=TRAININGS, ids=lambda training: training.__name__)
def study(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("updated") / "study", request.param, protocol=SHORT)


def score(study: Study, workload: Updated | None = None, **choices: Any) -> float:
    """Score of the replayed update, in a precision's own tolerances."""
    coarse = "precision" in choices
    return study.checks(study.job(workload, **choices), unit_roundoff=BF16 if coarse else FP32)[UPDATE].observed


class TestSame:
    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize("contiguous", [False, True])
    @pytest.mark.parametrize(("study", "implementation"), IMPLEMENTED, indirect=["study"])
    def test_an_update_passes_however_it_runs(
        self, study: Study, precision: str, implementation: str, contiguous: bool
    ) -> None:
        running = {"implementation": implementation, "contiguous": contiguous}
        assert score(study, optimizer_implementation=running, **PRECISIONS[precision]) < LIMIT / 2

    def test_gradients_may_be_anything(self, study: Study) -> None:
        """They are for other checks."""

        class Halved(study.make_workload):  # type: ignore[name-defined, misc]
            def loss(self, model: Any, batch: Any) -> torch.Tensor:
                return super().loss(model, batch) / 2

        assert score(study, Halved(), micro_batch={"num_micro_batches": 2}) < LIMIT / 2


class TestAnother:
    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize(("study", "planted"), PLANTED, indirect=["study"])
    def test_is_rejected_in_every_precision(self, study: Study, planted: type[Updated], precision: str) -> None:
        assert score(study, planted(), **PRECISIONS[precision]) > 50 * LIMIT

    def test_the_reason_names_tensor_step_and_share(self, tmp_path: Path) -> None:
        study = make_study(tmp_path / "study", BySGD, protocol=SHORT)
        planted = FAULTS["rate 10 % too high"](BySGD)
        assert planted is not None
        check = study.checks(study.job(planted()))[UPDATE]
        assert not check.passed
        assert "at step" in check.detail
        assert "rate by 0.1," in check.detail


class TestRule:
    """Rules of torch's optimizers by themselves."""

    @pytest.mark.parametrize("kind", ELEMENT_WISE)
    @pytest.mark.parametrize("changed", [1.0, 1.01])
    def test_each_is_replayed(self, kind: str, changed: float) -> None:
        """Parameters of a norm are all one, and in the first steps of Adam all their updates are one rate."""
        torch.manual_seed(0)
        named = {"norm": torch.nn.Parameter(torch.ones(64)), "product": torch.nn.Parameter(torch.randn(40, 30))}
        options = {"lr": 1e-3, **SOME_OPTIONS.get(kind, {})}
        optimizer = getattr(torch.optim, kind)(list(named.values()), **{**options, "lr": changed * options["lr"]})
        steps = [self.step(named, optimizer) for _ in range(4)]
        defaults = {name: value for name, value in optimizer.defaults.items() if name not in ("foreach", "fused")}
        group = RuleGroup(names=tuple(named), options={**defaults, **options})
        rule = UpdateRule(optimizer=kind, max_grad_norm=None, steps=((group,),) * 4)
        found = worst_deviation(rule, steps).score
        if kind == "Rprop" and changed != 1:  # its rate is that of the first step alone
            assert found > LIMIT
        else:
            assert (found < LIMIT / 2) == (changed == 1)

    def step(self, named: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> SeenStep:
        before = {name: p.detach().double().clone() for name, p in named.items()}
        for parameter in named.values():
            parameter.grad = torch.randn_like(parameter)
        gradients = {name: p.grad.double() for name, p in named.items() if p.grad is not None}
        optimizer.step()
        return SeenStep(
            before=before,
            gradients=gradients,
            norm=0.0,
            after={name: p.detach().double().clone() for name, p in named.items()},
            states=None,
            roundoff=torch.finfo(torch.float32).eps,
        )

    def test_a_parameter_without_a_gradient_deviates_infinitely(self) -> None:
        seen = SeenStep(before={}, gradients={}, norm=0.0, after={}, states=None, roundoff=1e-7)
        group = RuleGroup(names=("weight",), options={"lr": 0.1})
        found = worst_deviation(UpdateRule(optimizer="SGD", max_grad_norm=None, steps=((group,),)), [seen])
        assert (found.score, found.name) == (math.inf, "weight")


class TestNoRule:
    def test_an_optimizer_of_the_users_own_is_not_replayed_and_that_is_said(self, tmp_path: Path) -> None:
        study = make_study(tmp_path / "study", OfTheirOwn, protocol=SHORT)
        assert study.reference.rule is None
        assert "Own is not one of torch's" in study.reference.why_no_rule
        assert UPDATE not in study.checks(study.job())


class Own(torch.optim.SGD):
    """Might do anything."""


class OfTheirOwn(BySGD):
    kind = Own


def test_a_schedule_is_that_of_the_reference(tmp_path: Path) -> None:
    study = make_study(tmp_path / "study", WarmAdamW, protocol=SHORT)
    rule = study.reference.rule
    assert rule is not None
    rates = [group.options["lr"] for groups in rule.steps for group in groups]
    assert rates == pytest.approx([1e-3 * step / 20 for step in (1, 2, 3, 4)])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("pair") / "study", Pair, protocol=replace(SHORT, num_disturbed=2))


class TestSeveralOptimizers:
    """A step of the workload's own, in which two optimizers step."""

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_each_is_replayed_by_its_own_rule(self, pair: Study, precision: str) -> None:
        rules = [pair.reference.rule, *pair.reference.further_rules]
        assert sorted(rule.optimizer for rule in rules if rule is not None) == ["Adam", "RMSprop"]
        choices = PRECISIONS[precision]
        checks = pair.checks(pair.job(**choices), unit_roundoff=BF16 if choices else FP32, choices=choices or None)
        assert [name for name, check in checks.items() if not check.passed] == []
        assert checks[UPDATE].observed < LIMIT / 2

    @pytest.mark.parametrize("fault", [fault for fault in UNSEEN[Pair] if fault.part == "update"], ids=lambda f: f.name)
    def test_one_that_steps_otherwise_is_seen_under_16_bits(self, pair: Study, fault: Fault) -> None:
        planted = fault.plant(Pair)
        assert planted is not None
        assert UPDATE in pair.failed(pair.job(planted(), **PRECISIONS["bf16"]), unit_roundoff=BF16)

    def test_a_further_optimizer_and_a_further_update_are_seen(self, pair: Study) -> None:
        class Another(Pair):
            def training_step(self, job: Any, batch: Any) -> torch.Tensor:
                loss = super().training_step(job, batch)
                extra = torch.nn.Parameter(torch.ones(4))
                extra.grad = torch.ones(4)
                torch.optim.SGD([extra], lr=0.1).step()
                return loss

        class Twice(Pair):
            def training_step(self, job: Any, batch: Any) -> torch.Tensor:
                super().training_step(job, batch)
                return super().training_step(job, batch)

        assert "optimizers" in pair.checks(pair.job(Another()))[UPDATE].detail
        assert UPDATE in pair.failed(pair.job(Twice()))

    def test_the_reference_s_runs_begin_with_fresh_optimizers(self, pair: Study) -> None:
        """Else it would not repeat itself, and everything would be noise."""
        assert set(pair.reference.repetition.loss) == {0.0}

    def test_a_state_that_clipping_precedes_is_replayed_with_it(self, tmp_path: Path) -> None:
        class Unclipped(Clipping):
            max_grad_norm = None

        study = make_study(tmp_path / "study", Clipping, protocol=SHORT)
        assert study.reference.rule is not None
        assert study.reference.rule.max_grad_norm == Clipping.max_grad_norm
        assert study.failed(study.job()) == []
        assert UPDATE in study.failed(study.job(Unclipped(), **PRECISIONS["bf16"]), unit_roundoff=BF16)


class Clipping(BySGD):
    """A workload that clips in a step of its own."""

    max_grad_norm = 0.05

    def training_step(self, job: Any, batch: Any) -> torch.Tensor:
        loss = job.loss(batch)
        job.backward(loss)
        job.update()
        return loss  # type: ignore[no-any-return]
