"""Recomputed blocks: the same gradients, random numbers and statistics as kept ones."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_workloads import Everything, TinyViT
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steptune.tuner.hardware import find_compiler
from steptune.tuner.strategies.activation_checkpointing.strategy import (
    ActivationCheckpointing,
    _policy,
    checkpointed,
    saved_operators,
)
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.plan import Plan


class Dropping(Everything):
    """Blocks with dropout."""

    def model(self) -> nn.Module:
        return TinyViT(dropout=0.5)


def gradients(model: nn.Module, x: torch.Tensor, *, seed: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(seed)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def job_with(every: int | None, workload: Everything | None = None, save: str | None = None) -> TrainingJob:
    plan = Plan()
    ActivationCheckpointing().contribute(plan, {"every": every, "save": save})
    torch.manual_seed(0)
    return assemble(workload or Dropping(), plan, device=torch.device("cpu"))


@pytest.mark.parametrize("save", [None, "attention", "products"])
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
def test_a_block_is_exact_with_dropout_and_statistics(norm: type[nn.Module], save: str | None) -> None:
    """Bit for bit, over two steps: gradients, running statistics and their counter."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), norm(), nn.Dropout(0.5), nn.Linear(4, 4))
    recomputed = copy.deepcopy(plain)
    checkpointed(recomputed, save)
    for seed in (1, 2):
        x = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(seed))
        loss, expected = gradients(plain, x, seed=seed)
        again, found = gradients(recomputed, x, seed=seed)
        assert torch.equal(loss, again)
        assert all(map(torch.equal, found, expected))
        for name, value in plain.state_dict().items():
            assert torch.equal(value, recomputed.state_dict()[name]), name


def test_a_kept_result_may_be_changed_in_place_by_the_next_module() -> None:
    """Case of VGG: the convolution is kept as it was, bit for bit, the activation is recomputed."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Hardtanh(inplace=True))
    recomputed = copy.deepcopy(plain)
    checkpointed(recomputed, "products")
    x = torch.randn(2, 3, 8, 8)
    loss, expected = gradients(plain, x)
    again, found = gradients(recomputed, x)
    assert torch.equal(loss, again)
    assert all(map(torch.equal, found, expected))


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
        """Purpose of the block: activations inside it are not saved."""

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


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def operators_of(block: nn.Module, x: torch.Tensor) -> Counter[str]:
    """How often each operator of a forward and backward pass ran."""
    with Counting() as counting:
        block(x.clone().requires_grad_()).square().mean().backward()
    return counting.counts


class Attending(nn.Module):
    """Attention with dropout of its own, then another dropout: random numbers in two places."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=self.dropout if self.training else 0.0)
        return x + nn.functional.dropout(nn.functional.gelu(self.proj(y)), 0.5 if self.dropout else 0.0)


class TestSelective:
    @pytest.mark.parametrize(
        ("save", "products", "attentions", "gelus"), [(None, 2, 2, 2), ("attention", 2, 1, 2), ("products", 1, 1, 2)]
    )
    def test_what_is_saved_runs_once_and_the_rest_twice(
        self, save: str | None, products: int, attentions: int, gelus: int
    ) -> None:
        """The last operator of a block feeds no other one's backward pass, so here another follows."""
        block = nn.Sequential(Attending(0.0), nn.LayerNorm(8))
        checkpointed(block, save)
        ran = operators_of(block, torch.randn(2, 2, 6, 8))
        attended = ran["_scaled_dot_product_flash_attention_for_cpu"]
        assert (ran["addmm"], attended, ran["gelu"]) == (products, attentions, gelus)

    @pytest.mark.parametrize("save", ["attention", "products"])
    def test_attention_that_draws_random_numbers_is_exact(self, save: str) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(Attending(0.3), Attending(0.3))
        recomputed = copy.deepcopy(plain)
        checkpointed(recomputed, save)
        x = torch.randn(2, 2, 6, 8)
        loss, expected = gradients(plain, x)
        again, found = gradients(recomputed, x)
        assert torch.equal(loss, again)
        assert all(map(torch.equal, found, expected))

    def test_attention_with_dropout_is_not_saved(self) -> None:
        """Whatever implementation has the argument: its random numbers would be missing from the recomputation."""
        saved = saved_operators("attention")
        operator = torch.ops.aten._scaled_dot_product_flash_attention.default
        q = torch.empty(1)
        decided = {p: _policy(saved, None, operator, q, q, q, dropout_p=p).name for p in (0.0, 0.1)}
        assert decided == {0.0: "MUST_SAVE", 0.1: "PREFER_RECOMPUTE"}
        assert _policy(saved, None, operator, q, q, q, 0.1).name == "PREFER_RECOMPUTE"

    def test_every_named_operator_exists_here(self) -> None:
        assert saved_operators("attention") < saved_operators("products")
        assert all(hasattr(torch.ops.aten, name) for name in saved_operators("products"))


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [None, "products"])
def test_a_compiled_block_is_recomputed_all_the_same(
    save: str | None, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole graphs: no break, and the gradients of the block as it is."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    recomputed = copy.deepcopy(plain)
    checkpointed(recomputed, save)
    compiled = torch.compile(recomputed, fullgraph=True)
    x = torch.randn(4, 8)
    _, expected = gradients(plain, x)
    torch.manual_seed(3)
    compiled(x).square().mean().backward()
    for ours, theirs in zip(recomputed.parameters(), expected, strict=True):
        assert torch.allclose(ours.grad, theirs, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


class TestStrategy:
    def test_the_kept_operators_are_told_apart(self) -> None:
        strategy = ActivationCheckpointing()
        evidence = strategy.evidence(job_with(1, save="products"))
        assert strategy.took_effect(evidence, {"every": 1, "save": "products"}).took
        assert not strategy.took_effect(evidence, {"every": 1, "save": None}).took
        assert strategy.took_effect(evidence, {"every": 1, "save": "products"}).detail == (
            "2 blocks are recomputed, but their products"
        )

    @pytest.mark.parametrize(("every", "marked"), [(None, 0), (1, 2), (2, 1)])
    def test_every_kth_block_is_recomputed(self, every: int | None, marked: int) -> None:
        job = job_with(every)
        evidence = ActivationCheckpointing().evidence(job)
        assert evidence["checkpointed_blocks"] == marked

    @pytest.mark.parametrize("save", [None, "attention", "products"])
    @pytest.mark.parametrize("every", [1, 2])
    def test_a_run_with_dropout_is_the_same_run(self, every: int, save: str | None) -> None:
        plain, recomputed = job_with(None), job_with(every, save=save)
        batches = list(plain)
        losses = []
        for job in (plain, recomputed):
            torch.manual_seed(1)
            losses.append([float(job.step(batch)) for batch in batches])
        assert losses[0] == losses[1]
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
