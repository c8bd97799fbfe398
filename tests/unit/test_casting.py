"""Casting to 16 bits: what becomes 16-bit, what stays FP32, and what goes in and out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tuner.training.casting import cast_model, keeps_fp32

pytestmark = pytest.mark.usefixtures("one_thread")


class Root(nn.Module):
    """A normalisation layer of a user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return x * self.weight


class MyRMSNorm(Root):
    """Recognised by its name."""


class Mixture(nn.Module):
    """Norms, a router, and ordinary layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.own = MyRMSNorm(4)
        self.router = nn.Linear(4, 2)
        self.scale = Root(4)
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, Any]:
        self.seen = (x.dtype, mask.dtype)
        x = self.own(self.norm(self.inputs(x))) * self.table
        return {"out": self.scale(x), "weights": self.router(x), "mask": mask}


@pytest.mark.parametrize(
    ("name", "module", "kept"),
    [
        ("norm", nn.LayerNorm(2), True),
        ("norm", nn.RMSNorm(2), True),
        ("bn", nn.BatchNorm2d(2), True),
        ("bn", nn.SyncBatchNorm(2), True),
        ("gn", nn.GroupNorm(1, 2), True),
        ("x", MyRMSNorm(2), True),
        ("layers.0.router", nn.Linear(2, 2), True),
        ("router_logits", nn.Linear(2, 2), True),
        ("fc", nn.Linear(2, 2), False),
        ("normalise", nn.Linear(2, 2), False),
        ("routers", nn.Linear(2, 2), False),
        ("embedding", nn.Embedding(2, 2), False),
    ],
)
def test_norms_by_class_and_routers_by_name_stay_fp32(name: str, module: nn.Module, kept: bool) -> None:
    assert keeps_fp32(name, module) is kept


class TestO2:
    def test_norms_and_routers_keep_fp32_and_the_rest_does_not(self) -> None:
        model = cast_model(Mixture(), "bfloat16", keep_fp32=True)
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
            "norm.weight",
            "norm.bias",
            "own.weight",
            "router.weight",
            "router.bias",
        }
        assert dtypes["inputs.weight"] == dtypes["table"] == torch.bfloat16
        assert dtypes["steps"] == torch.int64

    def test_norms_compute_in_fp32_between_16_bit_layers(self) -> None:
        model = cast_model(Mixture(), "bfloat16", keep_fp32=True)
        model(torch.ones(2, 4), mask=torch.ones(2, dtype=torch.bool))
        assert model.own.seen == [torch.float32]
        assert model.scale.seen == [torch.bfloat16]

    @pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False), nn.InstanceNorm2d(3)])
    def test_convolutions_around_batch_norms_train(self, norm: nn.Module) -> None:
        model = cast_model(nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.Conv2d(3, 1, 1)), "bfloat16", keep_fp32=True)
        model(torch.randn(2, 3, 4, 4)).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        buffers = [b for b in norm.buffers() if b.is_floating_point()]
        assert {b.dtype for b in buffers} <= {torch.float32}


class TestO3:
    def test_everything_floating_is_16_bit(self) -> None:
        model = cast_model(Mixture(), "bfloat16", keep_fp32=False)
        dtypes = {tensor.dtype for tensor in model.state_dict().values()}
        assert dtypes == {torch.bfloat16, torch.int64}
        assert model(torch.ones(2, 4), mask=torch.ones(2))["out"].dtype == torch.float32


@pytest.mark.parametrize("keep_fp32", [True, False], ids=["O2", "O3"])
class TestBoundary:
    def test_takes_any_format_and_returns_fp32(self, keep_fp32: bool) -> None:
        """A loss is computed in FP32, and labels stay whole numbers."""
        model = cast_model(Mixture(), "bfloat16", keep_fp32=keep_fp32)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            output = model(torch.ones(2, 4, dtype=dtype), mask=torch.ones(2, dtype=torch.int64))
            assert model.seen == (torch.bfloat16, torch.int64)
            assert output["out"].dtype == output["weights"].dtype == torch.float32
            assert output["mask"].dtype == torch.int64

    def test_tied_weights_stay_tied(self, keep_fp32: bool) -> None:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        cast_model(model, "bfloat16", keep_fp32=keep_fp32)
        assert model[1].weight is model[0].weight
        assert model[0].weight.dtype == torch.bfloat16
