"""Recomputed blocks: the same gradients, random numbers and statistics as kept ones."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_workloads import Everything, TinyViT
from torch import nn

from tuner.strategies.activation_checkpointing import ActivationCheckpointing, checkpointed
from tuner.training.assemble import assemble
from tuner.training.job import TrainingJob
from tuner.training.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")


class Dropping(Everything):
    """Blocks with dropout."""

    def model(self) -> nn.Module:
        return TinyViT(dropout=0.5)


def gradients(model: nn.Module, x: torch.Tensor, *, seed: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(seed)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def job_with(every: int | None, workload: Everything | None = None) -> TrainingJob:
    plan = Plan()
    ActivationCheckpointing().contribute(plan, {"every": every})
    torch.manual_seed(0)
    return assemble(workload or Dropping(), plan, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm1d(6),
        lambda: nn.BatchNorm1d(6, momentum=None),
        lambda: nn.BatchNorm1d(6, track_running_stats=False),
        lambda: nn.InstanceNorm1d(6, track_running_stats=True),
        lambda: nn.LayerNorm(4),
    ],
    ids=["batch", "cumulative", "untracked", "instance", "layer"],
)
def test_a_block_is_exact_with_dropout_and_statistics(norm: type[nn.Module]) -> None:
    """Bit for bit, over two steps: gradients, running statistics and their counter."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), norm(), nn.Dropout(0.5), nn.Linear(4, 4))
    recomputed = copy.deepcopy(plain)
    checkpointed(recomputed)
    for seed in (1, 2):
        x = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(seed))
        loss, expected = gradients(plain, x, seed=seed)
        again, found = gradients(recomputed, x, seed=seed)
        assert torch.equal(loss, again)
        assert all(map(torch.equal, found, expected))
        for name, value in plain.state_dict().items():
            assert torch.equal(value, recomputed.state_dict()[name]), name


class TestBlock:
    def test_keeps_its_momentum_and_its_state_keys(self) -> None:
        block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.25))
        keys = list(block.state_dict())
        checkpointed(block)
        gradients(block, torch.randn(4, 6))
        assert list(block.state_dict()) == keys
        assert block[1].momentum == 0.25
        assert int(block[1].num_batches_tracked) == 1

    def test_keeps_only_its_input_for_the_backward_pass(self) -> None:
        """What it is for: activations inside the block are not saved."""

        def saved_by(block: nn.Module) -> int:
            count = 0

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal count
                count += tensor.numel() * (tensor.shape[:1] == (64,))
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                block(torch.randn(64, 8, requires_grad=True))
            return count

        block = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        plain = saved_by(block)
        checkpointed(block)
        assert saved_by(block) == 64 * 8 < plain

    def test_is_not_recomputed_in_evaluation(self) -> None:
        calls = 0

        class Counts(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                nonlocal calls
                calls += 1
                return super().forward(x)

        block = nn.Sequential(Counts(4, 4), nn.ReLU())
        checkpointed(block)
        for training, expected in ((True, 2), (False, 1)):
            calls = 0
            block.train(training)(torch.ones(2, 4)).sum().backward()
            assert calls == expected

    def test_passes_keyword_arguments(self) -> None:
        class Scaled(nn.Linear):
            def forward(self, x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
                return super().forward(x) * by

        block = Scaled(2, 2)
        expected = block(torch.ones(1, 2), by=3.0)
        checkpointed(block)
        assert torch.equal(block(torch.ones(1, 2), by=3.0), expected)


class TestStrategy:
    @pytest.mark.parametrize(("every", "marked"), [(None, 0), (1, 2), (2, 1)])
    def test_every_kth_block_is_recomputed(self, every: int | None, marked: int) -> None:
        job = job_with(every)
        evidence = ActivationCheckpointing().evidence(job)
        assert evidence["checkpointed_blocks"] == marked

    @pytest.mark.parametrize("every", [1, 2])
    def test_a_run_with_dropout_is_the_same_run(self, every: int) -> None:
        plain, recomputed = job_with(None), job_with(every)
        batches = list(plain)
        for job in (plain, recomputed):
            torch.manual_seed(1)
            job.losses = [float(job.step(batch)) for batch in batches]
        assert recomputed.losses == plain.losses
        for name, value in plain.state_dict().items():
            assert torch.equal(value, recomputed.state_dict()[name]), name


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_recomputed_blocks_can_be_compiled() -> None:
    """TorchDynamo takes no contexts of a checkpoint; only running statistics need them."""
    import torch._dynamo

    torch._dynamo.reset()
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.0))
    x = torch.randn(4, 8)
    expected = gradients(block, x)
    checkpointed(block)
    block.compile(backend="eager")
    torch.testing.assert_close(gradients(block, x), expected)
    torch._dynamo.reset()
