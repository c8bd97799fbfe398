"""Optimizers, contiguous parameters and padded products on a CUDA device: as on the CPU, within rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_workloads import Everything
from torch import nn

from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.casting import cast_model
from steptune.tuner.training.optimizers.lamb import Lamb
from steptune.tuner.training.optimizers.lars import Lars
from steptune.tuner.training.optimizers.sm3 import Sm3
from steptune.tuner.training.padding import pad_linears
from steptune.tuner.training.plan import OptimizerArguments, Plan, StepArguments

SHAPES = ((64, 96), (33,), (16, 8, 3, 3), (1000, 7), (5,))
NUM_STEPS = 10
DOUBLE = {"rtol": 1e-10, "atol": 1e-12}
SINGLE = {"rtol": 1e-4, "atol": 1e-6}
"""Sums of some thousand FP32 numbers in another order, over ten steps."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lamb": lambda p: Lamb(p, lr=0.01, weight_decay=0.1),
    "lars": lambda p: Lars(p, lr=1.0, weight_decay=0.01, trust=0.02),
    "sm3": lambda p: Sm3(p, lr=0.1, weight_decay=0.01),
    "sm3_with_momentum": lambda p: Sm3(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def trained(make: Callable[..., torch.optim.Optimizer], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters after steps on seeded gradients, on the CPU in float64."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]
    optimizer = make(made)
    for _ in range(NUM_STEPS):
        for p in made:
            p.grad = torch.randn(p.shape, generator=generator).to(device, dtype)
        optimizer.step()
    return [p.detach().double().cpu() for p in made]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, DOUBLE), (torch.float32, SINGLE)], ids=["64", "32"])
def test_updates_are_those_of_the_cpu(name: str, dtype: torch.dtype, tolerance: dict[str, float], device: str) -> None:
    for found, wanted in zip(
        trained(OPTIMIZERS[name], device, dtype), trained(OPTIMIZERS[name], "cpu", dtype), strict=True
    ):
        torch.testing.assert_close(found, wanted, **tolerance)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["lamb", "lars", "sm3"])
def test_a_step_never_waits_for_the_device(name: str, device: str) -> None:
    """Adafactor does, in torch's own loop."""
    made = [nn.Parameter(torch.randn(s, device=device)) for s in SHAPES]
    optimizer = OPTIMIZERS[name](made)
    for p in made:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Smooth(Everything):
    """No gradient that is zero but for rounding, whose sign decides about Adam's update."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 36, 5), nn.Tanh(), nn.Linear(5, 4)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() <= 1]},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, **self._options)


@pytest.fixture
def exact_products() -> Any:
    """FP32 convolutions without TF32, so that both sides compute alike."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def state_after(arguments: OptimizerArguments, device: str, **stages: Any) -> dict[str, torch.Tensor]:
    job = assemble(Smooth(), Plan(optimizer=arguments, **stages), device=torch.device(device, 0))
    for _ in range(2):
        for batch in job:
            assert torch.isfinite(job.step(batch))
    return {name: value.detach().cpu() for name, value in job.state_dict().items()}


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("implementation", ["for_loop", "foreach", "fused"])
def test_contiguous_parameters_train_alike(implementation: str, device: str) -> None:
    plain = state_after(OptimizerArguments(implementation=implementation), device)
    flat = state_after(OptimizerArguments(implementation=implementation, contiguous=True), device)
    for name, value in plain.items():
        torch.testing.assert_close(flat[name], value, **SINGLE, msg=lambda m, name=name: f"{name}: {m}")


def test_contiguous_masters_train_with_a_loss_scaler(device: str) -> None:
    stages: dict[str, Any] = {
        "cast": [lambda model, workload: cast_model(model, "float16", keep_fp32=True)],
        "step": StepArguments(loss_scaler=True),
    }
    plain = state_after(OptimizerArguments(master_weights=True), device, **copy.copy(stages))
    flat = state_after(OptimizerArguments(master_weights=True, contiguous=True), device, **copy.copy(stages))
    for name, value in plain.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(flat[name], value, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("multiple", [8, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(768, 50257), (768, 1000), (197, 768), (33, 65)])
def test_padded_products_in_16_bits_are_those_of_the_layer(
    multiple: int, inputs: int, outputs: int, device: str
) -> None:
    """Within the rounding of bfloat16's eight bits over sums of `inputs` terms."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(inputs, outputs)).to(device, torch.bfloat16)
    padded = pad_linears(copy.deepcopy(plain), multiple)
    x = torch.randn(128, inputs, device=device, dtype=torch.bfloat16)
    results = []
    for model in (plain, padded):
        y = model(x)
        y.float().square().mean().backward()
        results.append((y.detach().float(), *(p.grad.float() for p in model.parameters())))
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))
