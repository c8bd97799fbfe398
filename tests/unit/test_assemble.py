"""The assembled job: the order of its stages, and what one step does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_workloads import Everything, Line
from torch import nn

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.casting import cast_model
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.plan import LoaderArguments, OptimizerArguments, Plan, StepArguments
from steptune.tuner.workloads.workload import Workload

CPU = torch.device("cpu")


def build(workload: Workload, plan: Plan | None = None, **options: Any) -> TrainingJob:
    return assemble(workload, plan or Plan(), device=CPU, **options)


def first_batch(job: TrainingJob) -> Any:
    return next(iter(job))


class TestOrder:
    def test_every_stage_runs_once_and_in_the_order_of_the_plan(self) -> None:
        """A layout change after the cast, or an optimizer before it, would train other tensors."""
        happened: list[str] = []

        def note(stage: str) -> Callable[[Any, Workload], Any]:
            def transform(value: Any, workload: Workload) -> Any:
                happened.append(stage)
                return value

            return transform

        class Noting(Line):
            def model(self) -> nn.Module:
                happened.append("build")
                return super().model()

            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                happened.append("optimizer")
                return super().optimizer(named_parameters)

            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                happened.append("scheduler")

            def dataset(self) -> Any:
                happened.append("read")
                return super().dataset()

        plan = Plan(
            environment=[lambda: happened.append("environment")],
            model=[note("model 1"), note("model 2")],
            cast=[note("cast")],
            checkpointing=[note("checkpointing")],
            block_compilation=[note("block_compilation")],
            whole_compilation=[note("whole_compilation")],
            dataset=[note("dataset")],
        )
        build(Noting(), plan)
        assert happened == [
            "environment",
            "build",
            "model 1",
            "model 2",
            "cast",
            "checkpointing",
            "block_compilation",
            "optimizer",
            "scheduler",
            "whole_compilation",
            "read",
            "dataset",
        ]

    def test_the_optimizer_holds_the_parameters_that_are_trained(self) -> None:
        """Where a transform replaces parameters, those of `workload.model()` are stale."""

        def replaced(model: Any, workload: Workload) -> Any:
            model.weight = nn.Parameter(torch.full_like(model.weight, 2.0))
            return model

        job = build(Line(), Plan(model=[replaced]))
        job.step(first_batch(job))
        assert job.optimizer.param_groups[0]["params"] == [job.model.weight]
        assert not torch.equal(job.model.weight, torch.full_like(job.model.weight, 2.0))

    def test_frozen_parameters_are_not_given_to_the_optimizer(self) -> None:
        names: list[str] = []

        class Frozen(Everything):
            def model(self) -> nn.Module:
                model = super().model()
                model.patchify.requires_grad_(False)
                return model

            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                named = list(named_parameters)
                names.extend(name for name, _ in named)
                return super().optimizer(named)

        build(Frozen())
        assert "head.weight" in names
        assert not any(name.startswith("patchify") for name in names)

    def test_a_model_with_nothing_to_train_is_refused(self) -> None:
        class Frozen(Line):
            def model(self) -> nn.Module:
                return super().model().requires_grad_(False)

        with pytest.raises(WorkloadRejectedError, match=r"Frozen.model\(\) has no parameter that requires a gradient"):
            build(Frozen())


class TestWhatAStepGives:
    """An optimizer and a scheduler that want more are refused by name before the first step."""

    class Plateau(Line):
        def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    class SecondOrder(Line):
        def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.LBFGS([p for _, p in named_parameters])

    @pytest.mark.parametrize(
        ("workload", "message"),
        [
            (
                Plateau(),
                r"ReduceLROnPlateau.step requires the arguments metrics, but Steptune calls it after every update",
            ),
            (
                SecondOrder(),
                r"LBFGS.step requires the arguments closure, but Steptune calls it once after every backward pass",
            ),
        ],
    )
    def test_is_not_enough_for(self, workload: Workload, message: str) -> None:
        with pytest.raises(WorkloadRejectedError, match=message):
            build(workload)

    def test_is_for_a_step_of_the_users_own_to_say(self) -> None:
        class Own(self.Plateau):  # type: ignore[name-defined, misc]
            def training_step(self, job: TrainingJob, batch: Any) -> torch.Tensor:
                job.optimizer.zero_grad()
                loss = job.loss(batch)
                job.backward(loss)
                job.optimizer.step()
                job.scheduler.step(loss.detach())
                return loss

        job = build(Own())
        assert job.step(first_batch(job)) > 0


class TestOptimizer:
    @pytest.mark.parametrize("implementation", ["for_loop", "foreach", "fused"])
    def test_keeps_class_groups_and_options_under_another_implementation(self, implementation: str) -> None:
        class Groups(Everything):
            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                named = list(named_parameters)
                return torch.optim.AdamW(
                    [
                        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.3},
                        {"params": [p for _, p in named if p.dim() <= 1], "lr": 5e-4},
                    ],
                    lr=1e-4,
                    weight_decay=0.0,
                    betas=(0.8, 0.99),
                    amsgrad=True,
                )

        job = build(Groups(), Plan(optimizer=OptimizerArguments(implementation=implementation)))
        first, second = job.optimizer.param_groups
        assert type(job.optimizer) is torch.optim.AdamW
        assert (first["lr"], first["weight_decay"], second["lr"], second["weight_decay"]) == (1e-4, 0.3, 5e-4, 0.0)
        for group in (first, second):
            assert (group["betas"], group["amsgrad"]) == ((0.8, 0.99), True)
            assert (bool(group["foreach"]), bool(group["fused"])) == (
                implementation == "foreach",
                implementation == "fused",
            )
        assert len(first["params"]) + len(second["params"]) == len(list(job.model.parameters()))

    def test_a_scheduler_steps_the_optimizer_that_runs(self) -> None:
        class Decays(Line):
            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        job = build(Decays(), Plan(optimizer=OptimizerArguments(implementation="foreach")))
        for batch in [first_batch(job)] * 2:
            job.step(batch)
        assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


class TestStep:
    def test_is_one_update_by_the_users_rule(self) -> None:
        """Against the same step written by hand."""
        job = build(Line())
        x, y = first_batch(job)
        model = Line().model()
        loss = (model(x).squeeze(1) - y - 1).square().mean()
        loss.backward()
        expected = model.weight - 0.1 * model.weight.grad
        assert float(job.step([x, y])) == pytest.approx(float(loss.detach()))
        torch.testing.assert_close(job.model.weight, expected)
        assert job.model.weight.grad is None

    def test_returns_a_loss_that_keeps_no_graph(self) -> None:
        job = build(Line())
        assert not job.step(first_batch(job)).requires_grad

    def test_clips_what_the_optimizer_sees_and_shows_what_came_before(self) -> None:
        class Clipped(Line):
            max_grad_norm = 0.01

        job = build(Clipped())
        seen: list[torch.Tensor] = []
        job.on_gradients = lambda gradients: seen.extend(gradient.clone() for gradient in gradients)
        before = job.model.weight.detach().clone()
        job.step(first_batch(job))
        moved = (job.model.weight.detach() - before).norm()
        assert float(seen[0].norm()) > 0.1
        assert float(moved) == pytest.approx(0.1 * 0.01, rel=1e-4)

    @pytest.mark.parametrize("num_pieces", [1, 2])
    def test_clips_once_after_all_pieces(self, num_pieces: int) -> None:
        class Clipped(Line):
            max_grad_norm = 0.01

        job = build(Clipped(), Plan(step=StepArguments(num_micro_batches=num_pieces)))
        before = job.model.weight.detach().clone()
        job.step(first_batch(job))
        assert float((job.model.weight.detach() - before).norm()) == pytest.approx(0.1 * 0.01, rel=1e-4)

    def test_batch_transforms_run_after_the_users_own(self) -> None:
        class Shifted(Line):
            def batch_transform(self, batch: Any) -> Any:
                return [batch[0] + 1, batch[1]]

        job = build(Shifted(), Plan(batch=[lambda batch: [batch[0] * 2, batch[1]]]))
        x, y = first_batch(job)
        assert torch.equal(job.to_device([x, y])[0], (x + 1) * 2)

    def test_contexts_surround_forward_and_backward(self) -> None:
        inside: list[str] = []

        @contextmanager
        def context() -> Any:
            inside.append("in")
            yield
            inside.append("out")

        job = build(Line(), Plan(step=StepArguments(contexts=[context])))
        job.step(first_batch(job))
        assert inside == ["in", "out"] * 2

    def test_a_custom_step_has_the_pieces_and_keeps_the_count(self) -> None:
        class Twice(Line):
            def training_step(self, job: TrainingJob, batch: Any) -> torch.Tensor:
                for _ in range(2):
                    loss = job.loss(batch)
                    job.backward(loss)
                    job.update()
                return loss

        plain, job = build(Line()), build(Twice())
        batch = first_batch(plain)
        for _ in range(2):
            loss = plain.step(batch)
        assert torch.equal(job.step(batch), loss)
        assert torch.equal(job.model.weight, plain.model.weight)

    def test_an_overflow_under_a_loss_scaler_is_skipped_and_counted(self) -> None:
        """The update, and the learning rate's step with it; the next step counts again."""

        class Overflows(Line):
            factor = 1.0

            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                return super().loss(model, batch) * self.factor

            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        workload = Overflows()
        job = build(workload, Plan(step=StepArguments(loss_scaler=True)))
        batch = first_batch(job)
        for workload.factor, skipped, rate in ((float("inf"), 1, 0.1), (1.0, 1, 0.05)):
            job.step(batch)
            assert job.skipped_steps == skipped
            assert job.optimizer.param_groups[0]["lr"] == rate
        plain = build(Line())
        plain.step(batch)
        torch.testing.assert_close(job.model.weight, plain.model.weight)

    def test_state_has_the_users_own_names(self) -> None:
        assert build(Everything()).state_dict().keys() == Everything().model().state_dict().keys()


def cast_to_bfloat16(keep_fp32: bool) -> Plan:
    """O2 or O3."""
    return Plan(
        cast=[lambda model, workload: cast_model(model, "bfloat16", keep_fp32=keep_fp32)],
        optimizer=OptimizerArguments(master_weights=keep_fp32),
    )


class TestMasterWeights:
    def test_small_updates_add_up_in_the_masters_and_not_without_them(self) -> None:
        """1 + 2**-10 rounds to 1 in bfloat16: sixteen such updates move a master, and no 16-bit weight."""

        class SmallSteps(Line):
            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                return model(batch[0]).mean() * 0 - model.weight.sum()

            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                return torch.optim.SGD([p for _, p in named_parameters], lr=2.0**-10)

        with_masters, without = (
            build(SmallSteps(), cast_to_bfloat16(True)),
            build(SmallSteps(), cast_to_bfloat16(False)),
        )
        for job in (with_masters, without):
            batch = first_batch(job)
            for _ in range(16):
                job.step(batch)
        assert torch.equal(with_masters.state_dict()["weight"], torch.full((1, 3), 1 + 2.0**-6))
        assert torch.equal(with_masters.model.weight, torch.full((1, 3), 1 + 2.0**-6, dtype=torch.bfloat16))
        assert torch.equal(without.model.weight, torch.ones(1, 3, dtype=torch.bfloat16))

    def test_gradients_are_clipped_and_applied_in_fp32(self) -> None:
        job = build(Line(), cast_to_bfloat16(True))
        dtypes: list[torch.dtype] = []
        job.on_gradients = lambda gradients: dtypes.extend(gradient.dtype for gradient in gradients)
        job.step(first_batch(job))
        assert dtypes == [torch.float32]
        assert job.model.weight.grad is None

    def test_state_is_fp32_under_the_users_names(self) -> None:
        state = build(Everything(), cast_to_bfloat16(True)).state_dict()
        assert state.keys() == Everything().model().state_dict().keys()
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}

    def test_are_taken_anew_from_parameters_set_from_outside(self) -> None:
        job = build(Line(), cast_to_bfloat16(True))
        with torch.no_grad():
            job.model.weight.fill_(0.5)
        job.parameters_set()
        assert torch.equal(job.state_dict()["weight"], torch.full((1, 3), 0.5))


class TestPieces:
    def test_replacements_for_model_dataset_and_order(self) -> None:
        """How a trial starts from the saved state, observes the data and fixes their order."""
        model, data = nn.Linear(3, 1), list(zip(torch.ones(8, 3), torch.arange(8.0), strict=True))
        job = build(Line(), make_model=lambda: model, make_dataset=lambda: data, batch_sampler=[[5, 1]])
        assert job.model is model
        assert [batch[1].tolist() for batch in job] == [[5.0, 1.0]]

    def test_loader_arguments_reach_the_loader(self) -> None:
        job = build(Line(), Plan(loader=LoaderArguments(num_workers=2, prefetch_factor=3, persistent_workers=True)))
        loader = job.loader
        assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
