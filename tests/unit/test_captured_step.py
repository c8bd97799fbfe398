"""The captured step against the eager one. On a CPU the recorder calls the recorded functions again, which is what a
graph does; everything around it (static tensors, rates, skips, warm-up that is undone) is the code that runs on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_workloads import Everything, Line
from torch import nn

from steptune.tuner.errors import CaptureError
from steptune.tuner.strategies import strategy_named
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.captured_step import (
    MAX_RECORDINGS,
    WARM_UP_STEPS,
    CapturedStep,
    make_capturable,
    signature,
)
from steptune.tuner.training.casting import cast_model
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.plan import OptimizerArguments, Plan, StepArguments
from steptune.tuner.training.recorder import Recorded, Repeater
from steptune.tuner.workloads.workload import Workload

CPU = torch.device("cpu")
FUSED = "fused"


class Recording(Repeater):
    """Counts, and lets a test look between the recorded parts."""

    def __init__(self) -> None:
        self.num_warm_ups = 0

    def warm_up(self, run: Callable[[], object], count: int) -> None:
        self.num_warm_ups += count
        super().warm_up(run, count)


class Holding(Repeater):
    """Holds what the optimizer had on the host when it was recorded, as a graph does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def record(self, runs: Sequence[Callable[[], object]]) -> list[Recorded]:
        held = [dict(group) for group in self._optimizer.param_groups]

        def with_held(run: Callable[[], object]) -> object:
            groups = self._optimizer.param_groups
            now = [dict(group) for group in groups]
            for group, values in zip(groups, held, strict=True):
                group.update(values)
            try:
                return run()
            finally:
                for group, values in zip(groups, now, strict=True):
                    group.update(values)

        return super().record([partial(with_held, run) for run in runs])


class Decaying(Everything):
    """Clips, and halves its learning rate with every update."""

    max_grad_norm = 0.5

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class Dropping(Everything):
    def model(self) -> nn.Module:
        from tiny_workloads import TinyViT

        return TinyViT(dropout=0.5)


class Momentum(Line):
    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9, nesterov=True)


def job_of(workload: Workload, plan: Plan, *, captured: bool) -> TrainingJob:
    torch.manual_seed(0)
    plan.step.captured = captured
    job = assemble(workload, plan, device=CPU)
    torch.manual_seed(1)
    return job


def trained(workload: Workload, make_plan: Callable[[], Plan], *, captured: bool, steps: int = 5) -> tuple[Any, ...]:
    """Losses, the state and the job."""
    job = job_of(workload, make_plan(), captured=captured)
    batches = list(job.loader)
    losses = [float(job.step(batches[number % len(batches)])) for number in range(steps)]
    return losses, job.state_dict(), job


def fused_plan(**step: Any) -> Plan:
    return Plan(optimizer=OptimizerArguments(implementation=FUSED), step=StepArguments(**step))


def masters_plan() -> Plan:
    return Plan(
        cast=[lambda model, workload: cast_model(model, "bfloat16", keep_fp32=True)],
        optimizer=OptimizerArguments(implementation=FUSED, master_weights=True),
    )


CASES = {
    "AdamW": (Everything, fused_plan),
    "SGD with momentum": (Momentum, Plan),
    "clipping and a schedule": (Decaying, fused_plan),
    "dropout": (Dropping, fused_plan),
    "autocast": (Everything, lambda: fused_plan(autocast_dtype="bfloat16")),
    "masters": (Everything, masters_plan),
    "micro-batches": (Everything, lambda: fused_plan(num_micro_batches=4)),
    "loss scaler": (Everything, lambda: fused_plan(loss_scaler=True)),
    "loss scaler, SGD": (Momentum, lambda: Plan(step=StepArguments(loss_scaler=True))),
}


class TestSameTraining:
    @pytest.mark.parametrize("case", CASES)
    def test_as_the_eager_step(self, case: str) -> None:
        """Learning rates are FP32 tensors instead of Python's numbers, nothing else differs: one rounding a step."""
        make_workload, make_plan = CASES[case]
        eager_losses, eager_state, _ = trained(make_workload(), make_plan, captured=False)
        losses, state, job = trained(make_workload(), make_plan, captured=True)
        assert losses == pytest.approx(eager_losses, rel=1e-6)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_replays == 5
        assert job.runner.num_recordings == 1
        # The gradient of a key's bias is zero but for rounding, which Adam scales up to a whole step.
        for name, value in ((n, v) for n, v in eager_state.items() if not n.endswith("qkv.bias")):
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7)

    def test_the_first_step_is_a_replay_and_warm_up_leaves_no_trace(self) -> None:
        """Parameters, moments, step counts, buffers and random numbers are as before the first batch."""
        workload = Dropping()
        recorder = Recording()
        job = job_of(workload, fused_plan(), captured=True)
        job.runner = CapturedStep(job, recorder)
        batch = next(iter(job))
        eager = job_of(workload, fused_plan(), captured=False)
        torch.manual_seed(1)
        loss = float(job.step(batch))
        assert recorder.num_warm_ups == WARM_UP_STEPS
        torch.manual_seed(1)
        assert loss == pytest.approx(float(eager.step(batch)), rel=1e-6)
        steps = {float(state["step"]) for state in job.optimizer.state.values()}
        assert steps == {1.0}


def captured_job(workload: Workload, plan: Plan | None = None) -> tuple[TrainingJob, Any]:
    """A job, and its first batch."""
    job = job_of(workload, plan or fused_plan(), captured=True)
    return job, next(iter(job))


class Overflowing(Line):
    """Its loss is multiplied by the third part of a batch."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, factor = batch
        return super().loss(model, (x, y)) * factor

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class OverflowingMomentum(Overflowing):
    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9)


class TestSkippedSteps:
    FACTORS = (1.0, float("inf"), 1.0, 1.0)

    @pytest.mark.parametrize("implementation", ["for_loop", FUSED])
    def test_are_skipped_on_the_device_and_counted_when_asked(self, implementation: str) -> None:
        """The update, the momentum and the learning rate's step stay as they were, as in the eager step."""

        def run(captured: bool) -> tuple[list[float], TrainingJob]:
            plan = Plan(
                optimizer=OptimizerArguments(implementation=implementation), step=StepArguments(loss_scaler=True)
            )
            job = job_of(OverflowingMomentum(), plan, captured=captured)
            if isinstance(job.runner, CapturedStep):
                job.runner = CapturedStep(job)
            batch = next(iter(job))
            weights = []
            for factor in self.FACTORS:
                job.step([*batch, torch.tensor(factor)])
                weights.append(float(job.model.weight.detach().sum()))
            return weights, job

        eager_weights, eager = run(captured=False)
        weights, job = run(captured=True)
        assert weights == pytest.approx(eager_weights, rel=1e-6)
        assert weights[0] == weights[1]
        assert job.skipped_steps == eager.skipped_steps == 1
        assert job.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
        assert job.scaler is not None
        assert eager.scaler is not None
        assert job.scaler.get_scale() == eager.scaler.get_scale()

    def test_a_rate_that_the_update_holds_is_that_of_its_step(self) -> None:
        """With a loss scaler the scheduler's step is made late, but before the update that needs it."""
        rates = (1.0, 0.5, 0.1, 0.5, 1.0)

        class Stepped(Line):
            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, 4)])

        def run(captured: bool) -> list[torch.Tensor]:
            plan = Plan(optimizer=OptimizerArguments(implementation="for_loop"), step=StepArguments(loss_scaler=True))
            job = job_of(Stepped(), plan, captured=captured)
            if captured:
                job.runner = CapturedStep(job, Holding(job.optimizer))
            batch = next(iter(job))
            weights = []
            for _ in rates:
                job.step(batch)
                weights.append(job.model.weight.detach().clone())
            return weights

        torch.testing.assert_close(run(captured=True), run(captured=False))

    def test_the_count_can_be_set_back(self) -> None:
        job, batch = captured_job(OverflowingMomentum(), Plan(step=StepArguments(loss_scaler=True)))
        job.step([*batch, torch.tensor(float("inf"))])
        assert job.skipped_steps == 1
        job.skipped_steps = 0
        job.step([*batch, torch.tensor(float("inf"))])
        assert job.skipped_steps == 1


class Held(Holding):
    """And the gradients' tensors: a replay tells Python nothing of where they are and of whether one overflowed."""

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job.optimizer)
        self._job = job

    def record(self, runs: Sequence[Callable[[], object]]) -> list[Recorded]:
        def forgetting(run: Callable[[], object]) -> object:
            found = run()
            for parameter in self._job.parameters():
                parameter.grad = None
            if self._job.scaler is not None:
                self._job.scaler._per_optimizer_states.clear()
            return found

        return super().record([partial(forgetting, runs[0]), *runs[1:]]) if len(runs) == 1 else super().record(runs)


class Cycled(Line):
    """Another rate and another momentum in every step, clipped."""

    max_grad_norm = 0.5

    def __init__(self, cls: str = "SGD", **options: Any) -> None:
        self._make = partial(getattr(torch.optim, cls), lr=0.1, **options)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return self._make([p for _, p in named_parameters])

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=40)


class TestOptionsThatChange:
    """Learning rates, momenta and decays that the update reads on the host."""

    @pytest.mark.parametrize("scaled", [False, True], ids=["", "loss scaler"])
    @pytest.mark.parametrize(
        "workload",
        [
            Cycled(momentum=0.9),
            Cycled(momentum=0.9, fused=True),
            Cycled("AdamW"),
            Cycled("AdamW", fused=True),
            Cycled("RMSprop", momentum=0.5),
        ],
        ids=["SGD", "fused SGD", "AdamW", "fused AdamW", "RMSprop"],
    )
    def test_every_step_has_its_own_whatever_the_number_of_steps(self, workload: Cycled, scaled: bool) -> None:
        """The graph holds those of the step that was recorded; the host launches the update instead."""

        def run(captured: bool) -> tuple[list[torch.Tensor], TrainingJob]:
            job = job_of(workload, Plan(step=StepArguments(loss_scaler=scaled)), captured=captured)
            if captured:
                job.runner = CapturedStep(job, Held(job))
            weights = []
            for _ in range(8):
                for batch in job:
                    job.step(batch)
                    weights.append(job.model.weight.detach().clone())
            return weights, job

        (weights, job), (eager, _) = run(captured=True), run(captured=False)
        assert len(weights) == 24
        torch.testing.assert_close(weights, eager, rtol=1e-5, atol=1e-7)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_replays == 24
        assert job.runner.num_recordings == 3
        assert {"lr", "momentum", "betas"} & set(job.runner.host_options)
        effect = strategy_named("cuda_graph").took_effect(strategy_named("cuda_graph").evidence(job), {"scope": "step"})
        assert effect.took
        assert "launched outside the CUDA graph" in effect.detail

    def test_a_rate_that_is_a_tensor_of_the_host_is_none_of_the_device(self) -> None:
        """A scheduler fills it, so that it stays the same object."""
        job, batch = captured_job(Cycled(), Plan())
        group = job.optimizer.param_groups[0]
        group["lr"] = torch.tensor(0.5)
        job.runner = CapturedStep(job, Held(job))
        job.step(batch)
        with torch.no_grad():
            group["lr"].fill_(0.0)
        before = job.model.weight.detach().clone()
        job.step(batch)
        assert torch.equal(job.model.weight, before)

    def test_a_change_now_and_then_is_recorded_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Case of a rate that falls once an epoch; one recording at a time takes memory."""
        monkeypatch.setattr("steptune.tuner.training.captured_step.PAYS_AFTER_STEPS", 3)

        class Falling(Momentum):
            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.5)

        job, batch = captured_job(Falling(), Plan())
        for _ in range(60):
            job.step(batch)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_recordings == 10
        assert job.runner.host_options == ()

    def test_rates_that_are_tensors_on_the_device_change_nothing(self) -> None:
        job, batch = captured_job(Decaying(), fused_plan())
        for _ in range(8):
            job.step(batch)
        assert isinstance(job.runner, CapturedStep)
        assert (job.runner.num_recordings, job.runner.host_options) == (1, ())


class TestWhoLooksOn:
    def test_gradients_are_shown_between_the_two_graphs(self) -> None:
        """Unscaled and before clipping, as in the eager step; what is done to them there, the update takes."""

        class Clipped(Line):
            max_grad_norm = 0.01

        shown: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for captured, seen in shown.items():
            job = job_of(Clipped(), Plan(step=StepArguments(loss_scaler=True)), captured=captured)
            job.on_gradients = lambda gradients, seen=seen: seen.extend(g.clone() for g in gradients)
            job.step(next(iter(job)))
        torch.testing.assert_close(shown[True], shown[False])
        assert float(shown[True][0].norm()) > 0.1

    def test_the_guard_sees_the_same_training(self) -> None:
        """Its protocol: dropout off for some steps, then on; the step is recorded once for each."""
        from steptune.tuner.guard.curves import Protocol
        from steptune.tuner.trials.guard_protocol import run_protocol

        protocol = Protocol(num_pointwise=3, num_curve=3, num_horizon=0, randomness="switchable", seed=4)
        curves = []
        for captured in (True, False):
            job = job_of(Dropping(), fused_plan(), captured=captured)
            batches = list(job.loader)
            curve, update = run_protocol(job, batches, protocol, seed=4)
            curves.append((curve, update, job))
        (curve, update, job), (eager, _, _) = curves
        assert curve.losses == pytest.approx(eager.losses, rel=1e-6)
        assert curve.gradient_norms == pytest.approx(eager.gradient_norms, rel=1e-5)
        assert curve.curve_losses == pytest.approx(eager.curve_losses, rel=1e-5)
        assert curve.update_norm == pytest.approx(eager.update_norm, rel=1e-5)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_recordings == 2
        assert job.runner.num_replays == 6

    def test_a_loss_stays_what_it_was_when_the_next_step_runs(self) -> None:
        """Graphs write every loss to one place."""
        job, batch = captured_job(Everything())
        first = job.step(batch)
        value = float(first)
        job.step(batch)
        assert float(first) == value

    def test_parameters_set_from_outside_are_what_the_next_step_trains(self) -> None:
        job, batch = captured_job(Everything(), masters_plan())
        first = float(job.step(batch))
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.copy_(torch.zeros_like(parameter))
        job.parameters_set()
        assert float(job.step(batch)) != pytest.approx(first)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_recordings == 1

    @pytest.mark.parametrize("replaced", [True, False])
    def test_a_new_state_of_the_optimizer_is_recorded_anew(self, replaced: bool) -> None:
        """A graph would go on with the moments of before."""
        job, batch = captured_job(Everything())
        job.step(batch)
        if replaced:
            job.optimizer.load_state_dict(job.optimizer.state_dict())
        else:
            job.optimizer.state.clear()
        job.step(batch)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_recordings == 2
        assert {float(s["step"]) for s in job.optimizer.state.values()} == {2.0 if replaced else 1.0}

    @pytest.mark.parametrize("how", ["frozen", "moved"])
    def test_parameters_that_are_frozen_or_moved_are_recorded_anew(self, how: str) -> None:
        """A graph would go on training the one, and write to where the other was."""

        def run(captured: bool) -> TrainingJob:
            job = job_of(Everything(), fused_plan(), captured=captured)
            batch = next(iter(job))
            job.step(batch)
            if how == "frozen":
                job.model.head.requires_grad_(False)
            else:
                with torch.no_grad():
                    job.model.head.weight.data = torch.zeros_like(job.model.head.weight)
            job.step(batch)
            return job

        job, eager = run(captured=True), run(captured=False)
        torch.testing.assert_close(job.model.head.weight, eager.model.head.weight, rtol=1e-5, atol=1e-7)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_recordings == 2

    def test_a_checkpoint_has_the_rate_of_the_next_update(self) -> None:
        """The scheduler's step, which a loss scaler makes late, is made before."""
        job, batch = captured_job(Overflowing(), Plan(step=StepArguments(loss_scaler=True)))
        job.step([*batch, torch.tensor(1.0)])
        state = job.optimizer_state_dict()
        assert state["param_groups"][0]["lr"] == pytest.approx(0.05)
        job.step([*batch, torch.tensor(1.0)])
        job.load_optimizer_state_dict(state)
        assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        assert job.skipped_steps == 0
        assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)

    def test_so_has_that_of_the_scheduler(self) -> None:
        job, batch = captured_job(Overflowing(), Plan(step=StepArguments(loss_scaler=True)))
        job.step([*batch, torch.tensor(1.0)])
        state = job.scheduler.state_dict()
        assert state["last_epoch"] == 1
        job.step([*batch, torch.tensor(1.0)])
        job.scheduler.load_state_dict(state)
        assert job.scheduler.state_dict()["last_epoch"] == 1


class TestLimits:
    def test_hooks_of_the_optimizer_are_refused(self) -> None:
        job, batch = captured_job(Everything())

        def average(*_: Any) -> None:
            """Average the weights, say."""

        job.optimizer.register_step_post_hook(average)
        with pytest.raises(CaptureError, match=r"AdamW calls hooks around its update \(.*average\)"):
            job.step(batch)

    def test_a_few_shapes_are_recorded_and_no_more(self) -> None:
        job, (images, labels) = captured_job(Everything())
        for length in range(1, MAX_RECORDINGS + 1):
            job.step([images[:length], labels[:length]])
        job.step([images[:2], labels[:2]])
        with pytest.raises(CaptureError, match=r"batches have 5 shapes .*\(5, 3, 8, 8\).*pad batches"):
            job.step([images[:5], labels[:5]])

    def test_numbers_that_differ_from_batch_to_batch_are_refused(self) -> None:
        class Numbered(Line):
            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                return super().loss(model, batch[:2])

        job, batch = captured_job(Numbered(), Plan())
        for number in range(MAX_RECORDINGS):
            job.step([*batch, number])
        with pytest.raises(CaptureError, match="convert them to tensors"):
            job.step([*batch, MAX_RECORDINGS])

    def test_random_numbers_of_the_host_would_be_repeated(self) -> None:
        class Shortened(Everything):
            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                import random

                return super().loss(model, batch) * (1.0 if random.random() < 0.5 else 2.0)

        job, batch = captured_job(Shortened())
        with pytest.raises(CaptureError, match=r"random numbers on the host \(Python's random\).*torch.rand"):
            job.step(batch)

    def test_an_optimizer_that_counts_on_the_host_is_refused(self) -> None:
        class Factored(Line):
            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                return torch.optim.Adafactor([p for _, p in named_parameters])

        with pytest.raises(CaptureError, match=r"Adafactor does not support capturable=True.*AdamW"):
            job_of(Factored(), Plan(optimizer=OptimizerArguments(capturable=True)), captured=True)

    def test_dampened_momentum_is_refused(self) -> None:
        class Dampened(Line):
            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9, dampening=0.5)

        job, batch = captured_job(Dampened(), Plan())
        with pytest.raises(CaptureError, match="dampening"):
            job.step(batch)


class TestOptimizers:
    @pytest.mark.parametrize(
        "name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Rprop", "SGD"]
    )
    def test_begins_as_if_there_had_been_no_warm_up(self, name: str) -> None:
        """Each creates other state, and not all of it begins at zero."""
        cls = getattr(torch.optim, name)

        class Optimized(Line):
            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                return cls([p for _, p in named_parameters], lr=0.01)

        eager_losses, eager_state, eager = trained(Optimized(), Plan, captured=False)
        losses, state, job = trained(Optimized(), Plan, captured=True)
        assert losses == pytest.approx(eager_losses, rel=1e-5)
        torch.testing.assert_close(state, eager_state)
        (values,), (eager_values,) = job.optimizer.state.values() or ({},), eager.optimizer.state.values() or ({},)
        assert values.keys() == eager_values.keys()

    def test_counts_its_steps_on_the_device_where_that_is_another(self) -> None:
        """On a CPU the capturable form is refused by torch, and not needed."""
        for kind, capturable in (("cuda", True), ("cpu", False)):
            optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
            make_capturable(optimizer, torch.device(kind))
            assert [group["capturable"] for group in optimizer.param_groups] == [capturable]


def test_what_must_be_equal_in_two_batches() -> None:
    tensor = torch.ones(2, 3)
    assert signature({"a": tensor, "b": [tensor]}) == signature({"a": tensor + 1, "b": [tensor]})
    others: Sequence[Any] = (
        {"a": tensor[:1], "b": [tensor]},
        {"a": tensor.double(), "b": [tensor]},
        {"a": tensor.t().contiguous().t(), "b": [tensor]},
        {"a": tensor, "b": [1]},
    )
    assert all(signature(other) != signature({"a": tensor, "b": [tensor]}) for other in others)


def test_keys_in_another_order_are_the_same_batch() -> None:
    """Each tensor goes to the place of its name, not of its number."""

    class Named(Line):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(model, (batch["x"] + 2 * batch["shift"], batch["y"]))

    def run(captured: bool) -> tuple[list[float], TrainingJob]:
        job = job_of(Named(), fused_plan(), captured=captured)
        losses = []
        for x, y in job:
            batch = {"x": x, "shift": x.flip(0), "y": y}
            for order in (("x", "shift", "y"), ("shift", "y", "x")):
                losses.append(float(job.step({name: batch[name] for name in order})))
        return losses, job

    (losses, job), (eager, _) = run(captured=True), run(captured=False)
    assert losses == pytest.approx(eager, rel=1e-6)
    assert isinstance(job.runner, CapturedStep)
    assert job.runner.num_recordings == 1


class Boxed:
    """Says the same of itself whatever it holds."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __repr__(self) -> str:
        return "Boxed"


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.zeros(3), r"contains a numpy\.ndarray at \[2\]"),
        (Boxed(torch.ones(1)), r"contains a test_captured_step\.Boxed at \[2\]"),
        (torch.eye(2).to_sparse(), r"contains a torch\.Tensor at \[2\].*dense tensors"),
    ],
    ids=["array", "object", "sparse"],
)
def test_what_a_graph_would_keep_of_its_first_batch_is_refused(leaf: Any, message: str) -> None:
    """Two of them look alike, so that every step would have trained on the first."""

    class Ignoring(Line):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(model, batch[:2])

    job, batch = captured_job(Ignoring(), Plan())
    with pytest.raises(CaptureError, match=message):
        job.step([*batch, leaf])


def test_a_recorder_that_fails_ends_the_step_with_its_reason() -> None:
    class Refusing(Repeater):
        def record(self, runs: Sequence[Callable[[], object]]) -> list[Recorded]:
            raise CaptureError("the step cannot be recorded as a CUDA graph: aten::nonzero")

    job, batch = captured_job(Everything())
    job.runner = CapturedStep(job, Refusing())
    with pytest.raises(CaptureError, match="aten::nonzero"):
        job.step(batch)
