"""The captured step on a device: the same training as the eager step, and the reason where it cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from breakdowns import analyse
from tiny_workloads import Everything, Line, TinyViT
from torch import nn
from torch.utils.data import TensorDataset
from trial_builders import Prepared, prepare, reference

import steptune
from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import CaptureError
from steptune.tuner.profiling.reader import read_trace
from steptune.tuner.records import Breakdown, Candidate, FailureKind
from steptune.tuner.strategies import strategy_named
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.captured_step import CapturedStep
from steptune.tuner.training.casting import cast_model
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.plan import OptimizerArguments, Plan, StepArguments
from steptune.tuner.trials.capture import record_profile
from steptune.tuner.workloads.workload import Workload

pytestmark = pytest.mark.filterwarnings("ignore")
DEVICE = torch.device("cuda", 0)
STEPS = 20
SAME = 1e-4
"""Relative, of losses: kernels are the same, and library products may choose another algorithm within a graph."""
SAME_IN_16_BITS = 4e-3
"""One unit in the last place of bfloat16."""
RECORDED = Candidate(choices={"cuda_graph": {"scope": "step"}})
WAITING = (Category.HOST, Category.LAUNCH_LATENCY, Category.OPTIMIZER_HOST, Category.ALLOCATION)


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """FP32 products in FP32, so that differences are not TF32's."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


class Dropping(Everything):
    def model(self) -> nn.Module:
        return TinyViT(dropout=0.5)


class Decaying(Everything):
    max_grad_norm = 0.5

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


class Momentum(Line):
    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9)


def plan_of(implementation: str | None = None, *, masters: str | None = None, **step: Any) -> Callable[[], Plan]:
    def make() -> Plan:
        plan = Plan(
            optimizer=OptimizerArguments(implementation=implementation, master_weights=masters is not None),
            step=StepArguments(**step),
        )
        if masters is not None:
            plan.cast.append(lambda model, workload: cast_model(model, masters, keep_fp32=True))
        return plan

    return make


def trained(
    workload: Workload, plan: Plan, *, captured: bool
) -> tuple[list[float], dict[str, torch.Tensor], TrainingJob]:
    if captured:
        strategy_named("cuda_graph").contribute(plan, {"scope": "step"})
    torch.manual_seed(0)
    job = assemble(workload, plan, device=DEVICE)
    batches = list(job.loader)
    torch.manual_seed(1)
    losses = [job.step(batches[number % len(batches)]) for number in range(STEPS)]
    return [float(loss) for loss in losses], job.state_dict(), job


CASES: dict[str, tuple[type[Workload], Callable[[], Plan]]] = {
    "AdamW": (Everything, plan_of()),
    "AdamW, fused": (Everything, plan_of("fused")),
    "AdamW, loop": (Everything, plan_of("for_loop")),
    "SGD with momentum": (Momentum, plan_of()),
    "clipping and a schedule": (Decaying, plan_of()),
    "clipping and a schedule, fused": (Decaying, plan_of("fused")),
    "dropout": (Dropping, plan_of()),
    "O1 bfloat16": (Everything, plan_of(autocast_dtype="bfloat16")),
    "O1 float16": (Decaying, plan_of(autocast_dtype="float16", loss_scaler=True)),
    "O1 float16, fused": (Decaying, plan_of("fused", autocast_dtype="float16", loss_scaler=True)),
    "O2 bfloat16": (Decaying, plan_of("fused", masters="bfloat16")),
    "O2 float16": (Decaying, plan_of("fused", masters="float16", loss_scaler=True)),
    "micro-batches": (Everything, plan_of(num_micro_batches=4)),
}


class TestSameTraining:
    @pytest.mark.parametrize("case", CASES)
    def test_as_the_eager_step(self, case: str) -> None:
        make_workload, make_plan = CASES[case]
        eager_losses, eager_state, eager = trained(make_workload(), make_plan(), captured=False)
        losses, state, job = trained(make_workload(), make_plan(), captured=True)
        assert losses == pytest.approx(eager_losses, rel=SAME if "16" not in case else SAME_IN_16_BITS)
        assert isinstance(job.runner, CapturedStep)
        assert (job.runner.num_replays, job.runner.num_recordings) == (STEPS, 1)
        assert job.skipped_steps == eager.skipped_steps
        assert job.optimizer.param_groups[0]["lr"] == pytest.approx(eager.optimizer.param_groups[0]["lr"])
        # The gradient of a key's bias is zero but for rounding, which Adam scales up to a whole step.
        for name, value in ((n, v) for n, v in eager_state.items() if not n.endswith("qkv.bias")):
            torch.testing.assert_close(state[name].float(), value.float(), rtol=0.02, atol=2e-4)

    def test_recomputed_blocks_draw_the_same_numbers_again(self) -> None:
        """Recomputation sets the generator back, which torch allows within a recording since 2.10."""

        def checkpointed_plan() -> Plan:
            plan = plan_of("fused")()
            strategy_named("activation_checkpointing").contribute(plan, {"every": 1, "save": None})
            return plan

        eager_losses, _, _ = trained(Dropping(), checkpointed_plan(), captured=False)
        losses, _, job = trained(Dropping(), checkpointed_plan(), captured=True)
        assert losses == pytest.approx(eager_losses, rel=SAME)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_replays == STEPS

    @pytest.mark.parametrize("implementation", [None, "fused"])
    def test_an_overflow_is_skipped_on_the_device(self, implementation: str | None) -> None:
        class Overflows(Everything):
            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                images, labels, factor = batch
                return super().loss(model, (images, labels)) * factor

        def run(captured: bool) -> tuple[list[torch.Tensor], TrainingJob]:
            plan = plan_of(implementation, loss_scaler=True)()
            if captured:
                strategy_named("cuda_graph").contribute(plan, {"scope": "step"})
            torch.manual_seed(0)
            job = assemble(Overflows(), plan, device=DEVICE)
            batch = next(iter(job))
            seen = []
            for factor in (1.0, float("inf"), 1.0):
                job.step([*batch, torch.tensor(factor)])
                seen.append(job.model.head.weight.detach().clone())
            return seen, job

        eager_weights, eager = run(captured=False)
        weights, job = run(captured=True)
        assert torch.equal(weights[0], weights[1])
        torch.testing.assert_close(weights[2], eager_weights[2], rtol=1e-3, atol=1e-5)
        assert job.skipped_steps == eager.skipped_steps == 1
        assert job.scaler is not None
        assert eager.scaler is not None
        assert job.scaler.get_scale() == eager.scaler.get_scale()

    def test_a_rate_that_the_update_holds_is_that_of_its_step(self) -> None:
        """SGD reads it on the host; with a loss scaler the scheduler's step is made late."""

        class Stepped(Momentum):
            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.5, 0.1)[step % 3])

        make_plan = plan_of("foreach", loss_scaler=True)
        eager_losses, eager_state, _ = trained(Stepped(), make_plan(), captured=False)
        losses, state, job = trained(Stepped(), make_plan(), captured=True)
        assert losses == pytest.approx(eager_losses, rel=SAME)
        torch.testing.assert_close(state, eager_state)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_recordings == 3

    @pytest.mark.parametrize("masters", [None, "float16"])
    def test_options_that_change_with_every_step_leave_the_update_to_the_host(self, masters: str | None) -> None:
        """Rate and momentum; gradients, and whether one overflowed, come from the graph."""

        class Cycled(Momentum):
            max_grad_norm = 0.5

            def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
                return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * STEPS)

        make_plan = plan_of("foreach", masters=masters, loss_scaler=masters is not None)
        eager_losses, eager_state, eager = trained(Cycled(), make_plan(), captured=False)
        losses, state, job = trained(Cycled(), make_plan(), captured=True)
        assert losses == pytest.approx(eager_losses, rel=SAME if masters is None else SAME_IN_16_BITS)
        torch.testing.assert_close(state, eager_state, rtol=1e-3, atol=1e-5)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_replays == STEPS
        assert set(job.runner.host_options) == {"lr", "momentum"}
        assert job.skipped_steps == eager.skipped_steps

    def test_compiled_blocks_are_recorded_too(self) -> None:
        def compiled_plan() -> Plan:
            plan = plan_of("fused")()
            strategy_named("compile").contribute(plan, {"mode": "default", "scope": "regional", "dynamic": None})
            return plan

        eager_losses, _, _ = trained(Everything(), plan_of("fused")(), captured=False)
        losses, _, job = trained(Everything(), compiled_plan(), captured=True)
        assert losses == pytest.approx(eager_losses, rel=1e-3)
        assert isinstance(job.runner, CapturedStep)
        assert job.runner.num_replays == STEPS


@pytest.fixture
def uncapturable(tmp_path: Path) -> Iterator[Callable[[str], Prepared]]:
    """Workloads of tests/workloads/uncapturable.py, looked at on the device."""
    made: list[Prepared] = []

    def make(name: str) -> Prepared:
        folder = tmp_path / name
        folder.mkdir()
        made.append(prepare(reference("uncapturable", name), folder, with_reference=False, device="cuda"))
        return made[-1]

    yield make
    for prepared in made:
        prepared.runner.close()


class TestWhatCannotBeRecorded:
    @pytest.mark.parametrize(
        ("name", "operator", "line"),
        [
            ("Reads", "aten::_local_scalar_dense", "loss.item() > 1e9"),
            ("Branches", "aten::_local_scalar_dense", "if loss > 1e9:"),
            ("Shapes", "aten::", "loss.reshape(1)[loss.reshape(1) > -1]"),
            ("Copies", "", "torch.tensor([1.0], device=loss.device)"),
        ],
    )
    def test_a_step_that_waits_names_the_operator_and_the_line(self, name: str, operator: str, line: str) -> None:
        """Before anything is recorded: the device goes on working."""
        from steptune.tuner.workloads.loading import load_workload

        plan = plan_of("fused")()
        strategy_named("cuda_graph").contribute(plan, {"scope": "step"})
        job = assemble(load_workload(reference("uncapturable", name)), plan, device=DEVICE)
        with pytest.raises(CaptureError) as raised:
            job.step(next(iter(job)))
        assert operator in str(raised.value)
        assert line in str(raised.value)
        assert "uncapturable.py, line " in str(raised.value)
        assert float(torch.ones(3, device=DEVICE).sum()) == 3

    @pytest.mark.parametrize(
        ("name", "line"),
        [("Synchronises", "torch.cuda.synchronize()"), ("Seeds", "torch.cuda.manual_seed(17)")],
    )
    def test_a_recording_that_fails_ends_its_trial_and_no_other(
        self, uncapturable: Callable[[str], Prepared], name: str, line: str
    ) -> None:
        """Its rank may have lost the device; the next trial has a rank of its own."""
        prepared = uncapturable(name)
        (failed,) = prepared.run(prepared.spec(RECORDED, device="cuda", guard=False, profile=False))
        assert failed.failure is not None
        assert failed.failure.kind is FailureKind.UNSUPPORTED
        assert line in failed.failure.message
        assert "uncapturable.py, line " in failed.failure.message
        (after,) = prepared.run(prepared.spec(device="cuda", guard=False, profile=False))
        assert after.ok, after.failure

    @pytest.mark.parametrize("name", ["Reads", "Branches", "Shapes"])
    def test_what_was_seen_when_the_workload_was_looked_at_spends_no_trial(
        self, uncapturable: Callable[[str], Prepared], name: str
    ) -> None:
        assert "uncapturable.py, line " in uncapturable(name).facts.host_read

    def test_a_recorded_trial_runs_and_says_so(self, uncapturable: Callable[[str], Prepared]) -> None:
        prepared = uncapturable("Plain")
        assert prepared.facts.host_read == ""
        (result,) = prepared.run(prepared.spec(RECORDED, device="cuda", guard=False))
        assert result.ok, result.failure
        (effect,) = (e for e in result.effects if e.strategy == "cuda_graph")
        assert effect.took
        assert "steps replayed" in effect.detail
        assert result.startup is not None
        assert result.startup.compile_ns > 0


class Deep(steptune.Workload):
    """Two hundred layers of some microseconds each: the host cannot launch them as fast as they run."""

    global_batch = 64

    def model(self) -> nn.Module:
        return nn.Sequential(*(layer for _ in range(200) for layer in (nn.Linear(512, 512), nn.ReLU())))

    def dataset(self) -> Any:
        return TensorDataset(torch.randn(256, 512))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()


def profiled(*, captured: bool, folder: Path) -> Breakdown:
    plan = plan_of("fused")()
    if captured:
        strategy_named("cuda_graph").contribute(plan, {"scope": "step"})
    job = assemble(Deep(), plan, device=DEVICE)
    batch = [leaf.to(DEVICE) for leaf in next(iter(job))]
    for _ in range(10):
        job.step(batch)
    torch.cuda.synchronize()
    path = folder / f"{captured}.json"
    record_profile(lambda: job.step(batch), 5, DEVICE, path)
    (breakdown,) = analyse(read_trace(path))
    return breakdown


def test_gaps_of_a_launch_bound_step_shrink_below_a_twentieth(tmp_path: Path) -> None:
    eager = profiled(captured=False, folder=tmp_path)
    captured = profiled(captured=True, folder=tmp_path)
    assert eager.share(*WAITING) > 0.2
    assert captured.share(*WAITING) < 0.05
    assert captured.step_time_ns < eager.step_time_ns
