"""Casting to 16 bits: what becomes 16-bit, what stays FP32, and what goes in and out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from steptune.tuner.training.casting import cast_model, compute_routers_in_fp32, fp32_modules, is_norm, keeps_fp32
from steptune.tuner.training.initial_state import named_state
from steptune.tuner.training.master_weights import MasterWeights


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


class BatchNormAct2d(nn.BatchNorm2d):
    """With an activation inside, as timm's."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


class GroupNormAct(nn.GroupNorm):
    pass


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scaler(nn.LayerNorm):
    """A norm by its class, not by its name."""


class FrozenBatchNorm2d(nn.Module):
    """Buffers only, and a formula of its own, as torchvision's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, value in {"weight": 1.5, "bias": 0.1, "running_mean": 1e-3, "running_var": 1.0 + 2**-12}.items():
            self.register_buffer(name, torch.full((width,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class FrozenBatchNormAct2d(FrozenBatchNorm2d):
    """And an activation inside."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


class RMSNormGated(Root):
    """A norm although its name goes on."""


class Layernorm(Root):
    pass


class ChannelNormalization(Root):
    pass


class Shortened(MyRMSNorm):
    """A norm by the name of its base."""


class LayerNormLinear(nn.Module):
    """A fused layer: its matrix is what 16 bits are for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(torch.ones(4, 4))


class ConvNormAct(nn.Module):
    """Holds a convolution and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.bn = BatchNormAct2d(2)


class BackboneWithNorm(nn.Module):
    """A model of which the name tells a part."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 5, 4))
        self.layer = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("module", "norm"),
    [
        (BatchNormAct2d(2), True),
        (nn.BatchNorm2d(2).requires_grad_(False).eval(), True),
        (nn.LazyBatchNorm2d(), True),
        (nn.InstanceNorm2d(2, track_running_stats=True), True),
        (GroupNormAct(1, 2), True),
        (LayerNorm2d(2), True),
        (Scaler(2), True),
        (FrozenBatchNorm2d(2), True),
        (FrozenBatchNormAct2d(2), True),
        (RMSNormGated(2), True),
        (Layernorm(2), True),
        (ChannelNormalization(2), True),
        (Shortened(2), True),
        (LayerNormLinear(), False),
        (ConvNormAct(), False),
        (BackboneWithNorm(), False),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_norms_are_told_by_class_base_and_what_they_hold(module: nn.Module, norm: bool) -> None:
    assert is_norm(module) is norm


@pytest.mark.parametrize(
    "norm",
    [
        BatchNormAct2d(3),
        nn.BatchNorm2d(3).requires_grad_(False).eval(),
        nn.InstanceNorm2d(3, track_running_stats=True),
        GroupNormAct(1, 3),
        LayerNorm2d(3),
        FrozenBatchNorm2d(3),
        FrozenBatchNormAct2d(3),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_norm_of_any_kind_keeps_its_state_and_trains_between_convolutions(norm: nn.Module, dtype: str) -> None:
    norm = copy.deepcopy(norm)
    before = [tensor.clone() for _, tensor in named_state(norm)]
    model = cast_model(nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.Conv2d(3, 1, 1)), dtype, keep_fp32=True)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, named_state(norm), strict=True))
    model(torch.randn(2, 3, 4, 4)).square().mean().backward()
    assert {t.dtype for _, t in named_state(norm)} <= {torch.float32, torch.int64}
    assert model[0].weight.dtype == model[2].weight.dtype == getattr(torch, dtype)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


class Spectral(nn.Module):
    """Complex weights in the frequencies of its input, as in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8) + self.bias


class Rotating(nn.Module):
    """A complex buffer beside ordinary layers, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotation", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.first = nn.Linear(8, 8)
        self.spectral = Spectral()
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        turned = torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (4, 2))) * self.rotation)
        return self.last(self.spectral(turned.flatten(-2).type_as(x)))


@pytest.mark.parametrize("keep_fp32", [True, False], ids=["O2", "O3"])
class TestComplex:
    def test_numbers_stay_as_they_are_and_train(self, keep_fp32: bool) -> None:
        model = Rotating()
        rotation, weight = model.rotation.clone(), model.spectral.weight.detach().clone()
        cast_model(model, "bfloat16", keep_fp32=keep_fp32)
        assert torch.equal(model.rotation, rotation)
        assert torch.equal(model.spectral.weight, weight)
        assert model.first.weight.dtype == model.last.weight.dtype == torch.bfloat16
        output = model(torch.randn(4, 8))
        assert output.dtype == torch.float32
        output.square().mean().backward()
        assert model.spectral.weight.grad is not None
        assert model.spectral.weight.grad.is_complex()
        assert model.state_dict()["rotation"].dtype == torch.complex64

    def test_are_their_own_masters(self, keep_fp32: bool) -> None:
        """An FP32 copy would have lost the imaginary part."""
        model = cast_model(Rotating(), "bfloat16", keep_fp32=keep_fp32)
        masters = dict(MasterWeights(list(model.named_parameters())).updated([]))
        assert masters["spectral.weight"] is model.spectral.weight
        assert masters["first.weight"].dtype == torch.float32


class PreNorm(nn.Module):
    """Holds a norm and what it is for, and is no norm itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(x))


class ConditionedNorm(nn.Module):
    """A norm with weights of its own and a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.condition = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.condition(x)


class TopRouter(nn.Module):
    """Chooses experts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(x).softmax(-1).max(-1)


class Chooses(nn.Module):
    """An ordinary layer and a router of either kind."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.router = router

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        x = self.first(x)
        self.seen = self.router(x)
        return x, self.seen


class TestWhatKeepsFp32:
    def test_a_module_that_only_holds_a_norm_is_cast_but_for_the_norm(self) -> None:
        model = cast_model(PreNorm(nn.Linear(4, 4)), "bfloat16", keep_fp32=True)
        assert [name for name, _ in fp32_modules(model)] == ["norm"]
        assert model.inner.weight.dtype == torch.bfloat16
        assert model(torch.randn(2, 4)).dtype == torch.float32

    def test_what_is_inside_a_norm_or_a_router_goes_with_it(self) -> None:
        model = nn.ModuleDict({"a": ConditionedNorm(), "b": TopRouter()})
        assert [name for name, _ in fp32_modules(model)] == ["a", "b"]
        cast_model(model, "bfloat16", keep_fp32=True)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert model["a"](torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16


class TestRouters:
    """A projection gives logits in FP32 at every level; a router that chooses gives back 16 bits."""

    def test_logits_are_fp32_at_o2_as_if_the_model_were(self) -> None:
        model = Chooses(nn.Linear(4, 3))
        cast_model(model, "bfloat16", keep_fp32=True)
        x = torch.randn(5, 4)
        model(x)
        inputs = nn.functional.linear(x.bfloat16(), model.first.weight, model.first.bias)
        expected = nn.functional.linear(inputs.float(), model.router.weight, model.router.bias)
        assert torch.equal(model.seen, expected)

    def test_a_router_that_chooses_gives_16_bits_at_o2(self) -> None:
        model = cast_model(Chooses(TopRouter()), "bfloat16", keep_fp32=True)
        model(torch.randn(5, 4))
        assert [part.dtype for part in model.seen] == [torch.bfloat16, torch.int64]

    @pytest.mark.parametrize("router", [nn.Linear(4, 3), TopRouter()], ids=["projection", "chooses"])
    def test_autocast_leaves_them_alone_at_o1(self, router: nn.Module) -> None:
        model = compute_routers_in_fp32(Chooses(router))
        x = torch.randn(5, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first, seen = model(x)
        assert first.dtype == torch.bfloat16
        expected = router(first.float())
        both = zip(seen, expected, strict=True) if isinstance(seen, tuple) else [(seen, expected)]
        assert all(torch.equal(one, other) for one, other in both)


class TestO2:
    def test_norms_and_routers_keep_fp32_and_the_rest_does_not(self) -> None:
        model = cast_model(Mixture(), "bfloat16", keep_fp32=True)
        dtypes = {name: tensor.dtype for name, tensor in named_state(model)}
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
        dtypes = {tensor.dtype for _, tensor in named_state(model)}
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

    def test_state_is_given_and_taken_in_fp32(self, keep_fp32: bool) -> None:
        """State that a user saves can be loaded without Steptune, and the other way around."""
        model = cast_model(Mixture(), "bfloat16", keep_fp32=keep_fp32)
        state = model.state_dict()
        assert {name: value.dtype for name, value in state.items()} == {
            name: value.dtype for name, value in Mixture().state_dict().items()
        }
        assert all(
            torch.equal(value, dict(model.named_parameters())[name])
            for name, value in state.items()
            if "weight" in name
        )
        other = cast_model(Mixture(), "bfloat16", keep_fp32=keep_fp32)
        other.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))

    def test_tied_weights_stay_tied(self, keep_fp32: bool) -> None:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        cast_model(model, "bfloat16", keep_fp32=keep_fp32)
        assert model[1].weight is model[0].weight
        assert model[0].weight.dtype == torch.bfloat16
