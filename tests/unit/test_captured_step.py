"""The captured step against the eager one. On a CPU the recorder calls the recorded functions again, which is what a
graph does; everything around it (static tensors, rates, skips, warm-up that is undone) is the code that runs on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_workloads import Everything, Line
from torch import nn

from tuner.errors import CannotCapture
from tuner.training.assemble import assemble
from tuner.training.captured_step import MAX_RECORDINGS, WARM_UP_STEPS, CapturedStep, Recorded, Repeater, signature
from tuner.training.casting import cast_model
from tuner.training.job import TrainingJob
from tuner.training.plan import OptimizerArguments, Plan, StepArguments
from tuner.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FUSED = "fused"


class Recording(Repeater):
    """Counts, and lets a test look between the recorded parts."""

    def __init__(self) -> None:
        self.num_warm_ups = 0

    def warm_up(self, run: Callable[[], object], count: int) -> None:
        self.num_warm_ups += count
        super().warm_up(run, count)


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
        assert job.captured is not None
        assert job.captured.num_replays == 5
        assert job.captured.num_recordings == 1
        # The gradient of a key's bias is zero but for rounding, which Adam scales up to a whole step.
        for name, value in ((n, v) for n, v in eager_state.items() if not n.endswith("qkv.bias")):
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7)

    def test_the_first_step_is_a_replay_and_warm_up_leaves_no_trace(self) -> None:
        """Parameters, moments, step counts, buffers and random numbers are as before the first batch."""
        workload = Dropping()
        recorder = Recording()
        job = job_of(workload, fused_plan(), captured=True)
        job.captured = CapturedStep(job, recorder)
        batch = next(iter(job))
        eager = job_of(workload, fused_plan(), captured=False)
        torch.manual_seed(1)
        loss = float(job.step(batch))
        assert recorder.num_warm_ups == WARM_UP_STEPS
        torch.manual_seed(1)
        assert loss == pytest.approx(float(eager.step(batch)), rel=1e-6)
        steps = {float(state["step"]) for state in job.optimizer.state.values()}
        assert steps == {1.0}
