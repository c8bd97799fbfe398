"""The precision levels, each against its definition written out by hand: bit for bit, on a CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import SequentialSampler, TensorDataset

import steptune
from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.workloads.workload import Workload

NUM_STEPS = 4
O1_BF16 = {"level": "O1", "dtype": "bfloat16"}
BF16, FP16 = torch.bfloat16, torch.float16


class Net(nn.Module):
    """Convolution, batch and layer normalisation, tied and frozen weights, a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.layer_norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 3)
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.batch_norm(self.conv(x)).mean(2)) + self.shift
        return self.head(F.gelu(self.second(torch.tanh(self.first(self.layer_norm(x))))))


class Task(steptune.Workload):
    """A dozen samples in order."""

    global_batch = 6
    max_grad_norm = 1.0

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Net()

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(24, 4, 5, generator=generator), torch.arange(24) % 3)

    def sampler(self, dataset: Any) -> Any:
        return SequentialSampler(dataset)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9)


def build(workload: Workload, level: str, dtype: str | None, **others: Any) -> TrainingJob:
    choices = {s.name: dict(s.defaults) for s in STRATEGIES} | others
    choices["precision"] = {"level": level, "dtype": dtype}
    return assemble(workload, make_plan(choices), device=torch.device("cpu"))


def trained(level: str, dtype: str | None) -> tuple[list[float], TrainingJob]:
    job = build(Task(), level, dtype)
    return [float(job.step(batch)) for batch in list(job)[:NUM_STEPS]], job


def batches() -> list[Any]:
    return list(build(Task(), "fp32", None))[:NUM_STEPS]


def scaled(dtype: torch.dtype) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", enabled=dtype is FP16)


def o1_by_hand(dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Autocast around the forward pass, and the scaler as its documentation uses it."""
    workload = Task()
    model, scaler = workload.model(), scaled(dtype)
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer, losses = workload.optimizer(trainable), []
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = workload.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for _, p in trainable], 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def o2_by_hand(dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """All but the norms in 16 bits, cast by hand around the layer norm; masters updated in FP32."""
    workload = Task()
    model, scaler = workload.model(), scaled(dtype)
    norms = ("batch_norm", "layer_norm")
    for name, module in model.named_children():
        if name not in norms:
            module.to(dtype)
    model.shift.data = model.shift.to(dtype)
    layer_norm = model.layer_norm.forward
    model.layer_norm.forward = lambda x: layer_norm(x.float()).to(dtype)  # type: ignore[method-assign]
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    masters = {n: p if n.startswith(norms) else nn.Parameter(p.detach().float()) for n, p in trainable}
    optimizer, losses = workload.optimizer(masters.items()), []
    for samples, labels in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(samples.to(dtype)).float(), labels)
        scaler.scale(loss).backward()
        for name, parameter in trainable:
            if masters[name] is not parameter:
                assert parameter.grad is not None
                masters[name].grad, parameter.grad = parameter.grad.float(), None
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(masters.values(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for name, parameter in trainable:
                parameter.copy_(masters[name])
        losses.append(float(loss.detach()))
    state = {name: value.float() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    state |= {name: master.detach() for name, master in masters.items()}
    state["second.weight"] = state["first.weight"]
    return losses, state


def o3_by_hand(dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Everything in 16 bits: no masters, no scaling."""
    workload = Task()
    model = workload.model().to(dtype)
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer, losses = workload.optimizer(trainable), []
    for samples, labels in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(samples.to(dtype)).float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in trainable], 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    state = model.state_dict()
    return losses, {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


BY_HAND: dict[str, Callable[[torch.dtype], tuple[list[float], dict[str, torch.Tensor]]]] = {
    "O1": o1_by_hand,
    "O2": o2_by_hand,
    "O3": o3_by_hand,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", BY_HAND)
def test_a_level_is_its_definition_bit_for_bit(level: str, dtype: str) -> None:
    """Losses, and every parameter and statistic after some steps, tied and frozen ones included."""
    losses, job = trained(level, dtype)
    expected_losses, expected = BY_HAND[level](getattr(torch, dtype))
    assert losses == expected_losses
    state = job.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name
        assert value.dtype in (torch.float32, torch.int64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_o2_dtypes(dtype: str) -> None:
    """Weights and buffers in 16 bits; normalisation with its statistics, and all that is updated, in FP32."""
    _, job = trained("O2", dtype)
    sixteen = getattr(torch, dtype)
    model: Any = job.model
    assert {p.dtype for p in (model.conv.weight, model.frozen.weight, model.shift, model.head.bias)} == {sixteen}
    norms = (model.batch_norm, model.layer_norm)
    assert {t.dtype for m in norms for t in m.state_dict().values()} == {torch.float32, torch.int64}
    held = [p for group in job.optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in held} == {torch.float32}
    assert {t.dtype for s in job.optimizer.state.values() for t in s.values()} == {torch.float32}


def test_tied_weights_have_one_master_under_both_names() -> None:
    _, job = trained("O2", "bfloat16")
    model: Any = job.model
    assert model.first.weight is model.second.weight
    state = job.state_dict()
    assert torch.equal(state["first.weight"], state["second.weight"])
    assert not torch.equal(state["first.weight"], model.first.weight.float())  # the master, not its rounding
    assert [name for name, _ in job.updated_parameters()].count("first.weight") == 1


def test_frozen_weights_have_no_master_and_stay_as_they_were_rounded() -> None:
    _, job = trained("O2", "bfloat16")
    assert not any(name.startswith("frozen") for name, _ in job.updated_parameters())
    assert torch.equal(job.state_dict()["frozen.weight"], Task().model().frozen.weight.bfloat16().float())


class SignDescent(torch.optim.Optimizer):
    """An optimizer of a user's own, which knows nothing of implementations, scalers or masters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    assert parameter.dtype == parameter.grad.dtype == torch.float32
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class Signs(Task):
    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return SignDescent([p for _, p in named_parameters], lr=2.0**-12)


@pytest.mark.parametrize(("level", "dtype"), [("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")])
def test_an_optimizer_of_a_user_s_own_updates_fp32_values(level: str, dtype: str) -> None:
    """Every update is of one size, too small for a 16-bit weight near one: it shows in the masters in full."""
    job = build(Signs(), level, dtype)
    before = {name: value.clone() for name, value in job.state_dict().items()}
    for batch in list(job)[:2]:
        job.step(batch)
    after = job.state_dict()
    for name, _ in job.updated_parameters():
        moved = (after[name] - before[name]).abs()
        assert set((moved * 2**12).round().flatten().tolist()) <= {0.0, 1.0, 2.0}
        assert float(moved.max()) > 0


def test_an_optimizer_that_holds_the_model_s_own_weights_is_refused() -> None:
    class Ignores(Task):
        def model(self) -> nn.Module:
            self.made = super().model()
            return self.made

        def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.made.parameters(), lr=0.1)

    build(Ignores(), "O1", "bfloat16")
    with pytest.raises(
        WorkloadRejectedError, match=r"SGD holds \d+ 16-bit parameters.*build the optimizer from the named_parameters"
    ):
        build(Ignores(), "O2", "bfloat16")


class Sparse(Task):
    """An embedding whose gradient is sparse."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten())

    def dataset(self) -> Any:
        return TensorDataset(torch.arange(24).reshape(24, 1) % 5, torch.arange(24) % 3)

    max_grad_norm = None

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sparse_gradients_reach_their_masters(dtype: str) -> None:
    job, plain = build(Sparse(), "O2", dtype), build(Sparse(), "fp32", None)
    for batch in list(plain)[:3]:
        job.step(batch)
        plain.step(batch)
    found, expected = job.state_dict()["0.weight"], plain.state_dict()["0.weight"]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)
    assert torch.equal(found[5:], Sparse().model()[0].weight[5:].to(getattr(torch, dtype)).float())


def test_gradients_of_micro_batches_add_up_in_fp32() -> None:
    """1 and 2^-9 are 1 when they are added in bfloat16."""

    class Pieces(Task):
        global_batch = 2
        max_grad_norm = None

        def model(self) -> nn.Module:
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            return model

        def dataset(self) -> Any:
            return TensorDataset(torch.tensor([[2.0], [2.0**-8]]))

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return model(batch[0]).mean()

    job = build(Pieces(), "O2", "bfloat16", micro_batch={"num_micro_batches": 2})
    seen: list[float] = []
    job.on_gradients = lambda gradients: seen.extend(float(g) for g in gradients)
    job.step(next(iter(job)))
    assert seen == [1 + 2.0**-9]


class TestLossScale:
    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_halves_when_a_step_overflows_which_is_skipped_counted_and_reported(self, level: str) -> None:
        class Overflows(Task):
            factor = 1.0

            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                return super().loss(model, batch) * self.factor

        workload = Overflows()
        job = build(workload, level, "float16")
        batch = next(iter(job))
        assert job.loss_scale == 2.0**16
        workload.factor = 1e30
        before = {name: value.clone() for name, value in job.state_dict().items() if "batch_norm" not in name}
        job.step(batch)
        job.step(batch)
        assert (job.skipped_steps, job.loss_scale) == (2, 2.0**14)
        after = job.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        workload.factor = 1.0
        job.step(batch)
        assert (job.skipped_steps, job.loss_scale) == (2, 2.0**14)
        precision = strategy_named("precision")
        effect = precision.took_effect(precision.evidence(job), {"level": level, "dtype": "float16"})
        assert effect.took
        assert "loss scaled by 16384, 2 steps skipped" in effect.detail

    @pytest.mark.parametrize("dampening", [0.0, 0.5])
    def test_momentum_begins_with_the_first_update_that_is_not_skipped(self, dampening: float) -> None:
        """Fused SGD too: it makes the momentum when skipped and leaves it unwritten; torch fills it with NaN here."""

        class Momentum(Task):
            factor = 1e30

            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                return super().loss(model, batch) * self.factor

            def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
                return torch.optim.SGD([p for _, p in named_parameters], lr=0.1, momentum=0.9, dampening=dampening)

        def losses(implementation: str) -> list[float]:
            workload = Momentum()
            how = {"implementation": implementation, "contiguous": False}
            job = build(workload, "O2", "float16", optimizer_implementation=how)
            first, *rest = batches()
            job.step(first)
            workload.factor = 1.0
            return [float(job.step(batch)) for batch in rest]

        torch.use_deterministic_algorithms(True)
        try:
            assert losses("fused") == pytest.approx(losses("for_loop"), rel=1e-3)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_doubles_after_two_thousand_clean_steps(self) -> None:
        job = build(Sparse(), "O2", "float16")
        batch = next(iter(job))
        for _ in range(1999):
            job.step(batch)
        assert job.loss_scale == 2.0**16
        job.step(batch)
        assert (job.loss_scale, job.skipped_steps) == (2.0**17, 0)

    @pytest.mark.parametrize(("level", "dtype"), [("O1", "bfloat16"), ("O2", "bfloat16"), ("O3", "float16")])
    def test_is_not_there_for_bfloat16_and_at_o3(self, level: str, dtype: str) -> None:
        assert build(Task(), level, dtype).loss_scale is None


def effect_of(job: TrainingJob, level: str, dtype: str | None, **more: Any) -> Any:
    precision = strategy_named("precision")
    return precision.took_effect({**precision.evidence(job), **more}, {"level": level, "dtype": dtype})


class TestTookEffect:
    """Judgement by what was seen in the step, not by what was asked for."""

    @pytest.mark.parametrize(
        ("level", "dtype", "products"),
        [
            ("fp32", None, "5 in float32"),
            ("tf32", None, "5 in float32"),
            ("O1", "bfloat16", "5 in bfloat16, autocast to bfloat16"),
            ("O1", "float16", "5 in float16, autocast to float16"),
            ("O2", "bfloat16", "5 in bfloat16"),
            ("O3", "float16", "5 in float16"),
        ],
    )
    def test_counts_the_products_in_their_formats(self, level: str, dtype: str | None, products: str) -> None:
        """One convolution and four linear layers."""
        before = torch.get_float32_matmul_precision()
        try:
            job = build(Task(), level, dtype)
            job.step(next(iter(job)))
            effect = effect_of(job, level, dtype)
        finally:
            torch.set_float32_matmul_precision(before)
        assert effect.took
        assert f"matmuls observed: {products}" in effect.detail

    def test_a_workload_that_leaves_autocast_computes_in_fp32_at_o1(self) -> None:
        class Leaves(Task):
            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                with torch.autocast("cpu", enabled=False):
                    return super().loss(model, batch)

        job = build(Leaves(), "O1", "bfloat16")
        job.step(next(iter(job)))
        effect = effect_of(job, "O1", "bfloat16")
        assert not effect.took
        assert "matmuls observed: 5 in float32" in effect.detail

    def test_a_workload_with_autocast_of_its_own_is_not_fp32(self) -> None:
        class Enters(Task):
            def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return super().loss(model, batch)

        job = build(Enters(), "fp32", None)
        job.step(next(iter(job)))
        effect = effect_of(job, "fp32", None)
        assert not effect.took
        assert "matmuls observed: 5 in bfloat16" in effect.detail

    def test_norms_in_16_bits_are_not_o2(self) -> None:
        job = build(Task(), "O2", "bfloat16")
        job.step(next(iter(job)))
        model: Any = job.model
        model.batch_norm.running_mean = model.batch_norm.running_mean.bfloat16()
        assert not effect_of(job, "O2", "bfloat16").took

    @pytest.mark.parametrize("level", ["fp32", "O1"])
    def test_what_was_not_seen_is_not_claimed(self, level: str) -> None:
        """Before a step, and in a step that never asks the job for its loss."""

        class Own(Task):
            def training_step(self, job: TrainingJob, batch: Any) -> torch.Tensor:
                loss = self.loss(job.model, batch)
                job.backward(loss)
                job.update()
                return loss

        dtype = "bfloat16" if level == "O1" else None
        job = build(Own(), level, dtype)
        job.step(next(iter(job)))
        effect = effect_of(job, level, dtype)
        assert "no matmul was observed: the job computed no loss" in effect.detail
        assert effect.took == (level == "fp32")

    def test_compiled_code_shows_autocast_only(self) -> None:
        def compiled(model: nn.Module, workload: Any) -> nn.Module:
            model.compile(backend="aot_eager")
            return model

        torch._dynamo.reset()
        plan = make_plan({s.name: dict(s.defaults) for s in STRATEGIES} | {"precision": O1_BF16})
        plan.whole_compilation.append(compiled)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job = assemble(Task(), plan, device=torch.device("cpu"))
            job.step(next(iter(job)))
        effect = effect_of(job, **O1_BF16)
        assert effect.took
        assert (
            "no matmul was observed (matmuls of compiled or recomputed code cannot be observed), autocast to bf"
            in effect.detail
        )

    def test_a_kernel_of_tf32_is_named_where_one_ran(self) -> None:
        job = build(Task(), "fp32", None)
        job.step(next(iter(job)))
        kernel = "sm80_xmma_gemm_f32f32_tf32f32_f32"
        seen = {"fp32_products": "high", "operators": ("aten::mm", kernel)}
        assert f"ran {kernel}" in effect_of(job, "tf32", None, **seen).detail
        unseen = effect_of(job, "tf32", None, fp32_products="high", operators=("aten::mm",))
        assert "no TF32 kernel was among the longest" in unseen.detail
        assert not effect_of(job, "tf32", None, fp32_products="highest").took

    def test_complex_weights_are_no_format_of_a_level(self) -> None:
        class Complex(Task):
            def model(self) -> nn.Module:
                class Spectral(nn.Module):
                    def __init__(self) -> None:
                        super().__init__()
                        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
                        self.bias = nn.Parameter(torch.zeros(3))

                    def forward(self, x: torch.Tensor) -> torch.Tensor:
                        return (x * self.weight).real + self.bias

                return nn.Sequential(nn.Flatten(), nn.Linear(20, 3), Spectral())

        for level in ("O2", "O3"):
            job = build(Complex(), level, "bfloat16")
            job.step(next(iter(job)))
            effect = effect_of(job, level, "bfloat16")
            assert effect.took, effect.detail


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_zoo_router_stays_fp32(level: str) -> None:
    """Its weights up to O2, and its logits at every level."""
    from steptune.tuner.workloads.loading import load_workload

    workload = load_workload(
        "zoo:mixture_of_experts?batch=2&sequence=8&vocabulary=20&width=8&depth=1&num_heads=2&num_experts=3"
    )
    job = build(workload, level, "bfloat16")
    router = job.model.blocks[0].experts.router
    seen: list[torch.dtype] = []
    inner = copy.copy(router.forward)
    router.forward = lambda x: seen.append((out := inner(x)).dtype) or out
    job.step(next(iter(job)))
    assert seen == [torch.float32]
    assert router.weight.dtype == (torch.bfloat16 if level == "O3" else torch.float32)
