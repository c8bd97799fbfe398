"""Shifted-window attention: dropout, what it refuses, and published models' own layers."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from steptune.kernels.window_attention import (  # noqa: E402
    Geometry,
    kernel,
    launch,
    reference,
    window_attention,
)
from steptune.kernels.window_attention.pattern import OPERATORS  # noqa: E402

DEVICE = "cuda" if ON_DEVICE else "cpu"


class TestDropout:
    """With queries of zero all probabilities are 1 / N, and with one-hot values the output is the mask itself."""

    geometry = Geometry(rows=4, columns=4, shift_rows=2, shift_columns=2)
    probability = 0.25

    def masks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs, the output, and which pairs were kept, of shape (windows, heads, 16, 16)."""
        batch, side, heads = 3, 8, 2
        qkv = torch.zeros(batch, side, side, 3, heads, 16, device=DEVICE)
        token = torch.arange(side, device=DEVICE) + 2  # the map is rolled by 2
        position = (token % 4)[:, None] * 4 + (token % 4)[None, :]
        qkv[:, :, :, 2] = torch.nn.functional.one_hot(position, 16)[None, :, :, None]
        qkv = qkv.flatten(3).requires_grad_()
        table = torch.zeros(49, heads, device=DEVICE)
        torch.manual_seed(0)
        out = window_attention(
            qkv, table, self.geometry, scale_h=torch.ones(heads, device=DEVICE), dropout=self.probability
        )
        rolled = torch.roll(out, (-2, -2), (1, 2)).view(batch, 2, 4, 2, 4, heads, 16)
        kept = rolled.transpose(2, 3).reshape(-1, 16, heads, 16).transpose(1, 2) > 0
        return qkv, out, kept

    def test_the_rate_of_what_is_kept_and_its_scale(self) -> None:
        _, out, kept = self.masks()
        inner = kept[0::4]  # windows that the map's edge does not cut have all 16 pairs a token
        assert float(inner.float().mean()) == pytest.approx(1 - self.probability, abs=0.03)
        scales = out.detach()[out.detach() > 0]
        assert float(scales.min()) >= 1 / 16 / (1 - self.probability) - 1e-6

    def test_no_two_windows_heads_or_images_share_a_mask(self) -> None:
        _, _, kept = self.masks()
        inner = kept[0::4].reshape(-1, 256)
        assert len(torch.unique(inner, dim=0)) == len(inner)
        rows = kept[0::4].reshape(-1, 16)
        assert len(torch.unique(rows, dim=0)) > 0.9 * len(rows)

    def test_the_gradient_is_that_of_the_mask_that_was_used(self) -> None:
        qkv, out, kept = self.masks()
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        (found,) = torch.autograd.grad(out, qkv, weights)
        wide = qkv.detach().double().cpu().requires_grad_()
        wanted_out = reference(
            wide,
            torch.zeros(49, 2, dtype=torch.float64),
            self.geometry,
            scale_h=torch.ones(2, dtype=torch.float64),
            keep_mask=kept.double().cpu(),
            dropout=self.probability,
        )
        (wanted,) = torch.autograd.grad(wanted_out, wide, weights.double().cpu())
        assert torch.allclose(out.detach().double().cpu(), wanted_out.detach(), atol=1e-6)
        assert torch.allclose(found.double().cpu(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("channels", "heads", "rows", "reason"),
    [
        (96, 5, 7, "requires heads of 16, 32, 64, 128 channels; this layer has 96 channels in 5 heads"),
        (24, 1, 7, "this layer has 24 channels in 1 heads"),
        (32, 1, 24, "requires windows of at most 256 tokens; this layer's windows have 576"),
    ],
)
def test_a_layer_that_it_cannot_run_is_refused(channels: int, heads: int, rows: int, reason: str) -> None:
    geometry = Geometry(rows=rows, columns=rows)
    qkv = torch.zeros(1, rows, rows, 3 * channels, device=DEVICE)
    table = torch.zeros(geometry.table_length, heads, device=DEVICE)
    with pytest.raises(ValueError, match=reason):
        window_attention(qkv, table, geometry, scale_h=torch.ones(heads, device=DEVICE))


def test_a_shift_as_large_as_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the shift of rows must be in \[0, 7\), got 7"):
        Geometry(rows=7, columns=7, shift_rows=7)


@pytest.mark.parametrize("side", [16, 18], ids=["whole windows", "padded"])
@pytest.mark.parametrize("block", [0, 1], ids=["unshifted", "shifted"])
def test_transformers_layers_have_the_same_answer(block: int, side: int) -> None:
    """Its published code pads first, rolls then, and masks by -100."""
    transformers = pytest.importorskip("transformers", minversion="5.20")
    from transformers.models.swin.modeling_swin import SwinLayer

    config = transformers.SwinConfig(embed_dim=32, window_size=4, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    layer = SwinLayer(config, dim=32, input_resolution=(side, side), num_heads=2, shift_size=2 * block).to(DEVICE)
    layer.eval()
    attention = layer.attention
    seen = {}
    layer.layernorm_before.register_forward_hook(lambda module, inputs, output: seen.update(tokens=output))
    attention.o_proj.register_forward_pre_hook(lambda module, inputs: seen.update(values=inputs[0]))
    layer(torch.randn(2, side * side, 32, device=DEVICE), (side, side))
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    weight = torch.cat([p.weight for p in projections])
    bias = torch.cat([p.bias for p in projections])
    qkv = torch.nn.functional.linear(seen["tokens"].view(2, side, side, 32), weight, bias)
    geometry = Geometry(rows=4, columns=4, shift_rows=2 * block, shift_columns=2 * block)
    scale = torch.full((2,), 16**-0.5, device=DEVICE)
    (table,) = attention.relative_position_bias.parameters()
    found = window_attention(qkv, table, geometry, scale_h=scale, qkv_bias_c=bias)
    padded = -(-side // 4) * 4
    windows = seen["values"].view(2, padded // 4, padded // 4, 4, 4, 32).transpose(2, 3).reshape(2, padded, padded, 32)
    wanted = torch.roll(windows, (2 * block, 2 * block), (1, 2))[:, :side, :side]
    assert torch.allclose(found, wanted, atol=1e-5)


class Operators(TorchDispatchMode):
    """Notes the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.name())
        return function(*arguments, **(options or {}))


class TestWithoutTheDispatcher:
    geometry = Geometry(rows=4, columns=4, shift_rows=2, shift_columns=2)

    def attended(self) -> tuple[torch.Tensor, ...]:
        """Inputs, the values, and the inputs' gradients, of a padded map."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        shapes = ((2, 7, 8, 96), (49, 2), (96,))
        given = [torch.randn(s, device=DEVICE, generator=generator).requires_grad_() for s in shapes]
        scale = torch.full((2,), 0.25, device=DEVICE)
        out = window_attention(given[0], given[1], self.geometry, scale_h=scale, qkv_bias_c=given[2])
        return out, *torch.autograd.grad(out.square().sum(), given, retain_graph=True)

    def test_calls_that_are_watched_are_the_operator_and_give_the_same_bits(self) -> None:
        found = self.attended()
        with Operators() as operators:
            watched = self.attended()
        assert {"steptune::window_attention", "steptune::window_attention_backward"} <= set(operators.names)
        assert all(torch.equal(a, b) for a, b in zip(found, watched, strict=True))
        assert any(name in found[0].grad_fn.name() for name in OPERATORS)  # what a profile shows

    @pytest.mark.parametrize("is_watched", [False, True], ids=["call", "operator"])
    def test_layers_that_are_computed_again_have_the_same_gradients(self, is_watched: bool) -> None:
        """Tensors saved for them may be asked for once."""
        given, table = torch.randn(1, 4, 4, 48, device=DEVICE).requires_grad_(), torch.zeros(49, 1, device=DEVICE)

        def layer(qkv: torch.Tensor) -> torch.Tensor:
            return window_attention(qkv, table, Geometry(rows=4, columns=4), scale_h=torch.ones(1, device=DEVICE))

        (wanted,) = torch.autograd.grad(layer(given).square().sum(), given)
        with Operators() if is_watched else nullcontext():
            out = checkpoint(layer, given, use_reentrant=False)
            (found,) = torch.autograd.grad(out.square().sum(), given)
        assert torch.equal(found, wanted)

    def test_a_second_derivative_is_refused(self) -> None:
        qkv = torch.randn(1, 4, 4, 48, device=DEVICE, requires_grad=True)
        table = torch.zeros(49, 1, device=DEVICE)
        out = window_attention(qkv, table, Geometry(rows=4, columns=4), scale_h=torch.ones(1, device=DEVICE))
        (gradient,) = torch.autograd.grad(out.square().sum(), qkv, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


class Compiler:
    """Stands for a kernel of Triton's: counts what it compiles, and notes what the code is launched with."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self.launched: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]):
        def compiling(*arguments: object, **constants: object) -> "Code":
            self.num_compiled += 1
            return Code(self.launched)

        return compiling


class Code:
    def __init__(self, launched: list[tuple[object, ...]]) -> None:
        self.launched = launched

    function, packed_metadata = "function", "metadata"

    def run(self, *arguments: object) -> None:
        self.launched.append(arguments)


class OnDevice:
    """Stands for a tensor of a device that this machine may lack."""

    dtype = torch.float32

    def __init__(self, device: int) -> None:
        self.device = device

    def get_device(self) -> int:
        return self.device

    def data_ptr(self) -> int:
        return 256


class TestPlan:
    def test_code_is_compiled_once_for_what_it_is_specialised_on(self) -> None:
        plan, compiler = launch.Plan(grid=(1, 1, 1), sizes=(), constants={"N": 4}), Compiler()
        whole = torch.zeros(64)
        plan.run(compiler, (whole,), (3,))
        plan.run(compiler, (whole.clone(),), (3,))
        assert compiler.num_compiled == 1
        [(*grid, _, function, metadata, _, _, _, _, size, constant)] = compiler.launched
        assert (grid, function, metadata) == ([1, 1, 1], "function", "metadata")
        assert (size, constant) == (3, 4)
        for tensor, size in ((whole, 16), (whole[1:], 3), (whole.half(), 3)):  # size, alignment, dtype
            plan.run(compiler, (tensor,), (size,))
        assert compiler.num_compiled == 4

    def test_compiled_code_gets_addresses(self) -> None:
        """Triton takes tensors, too, and asks each again for its address."""
        plan, compiler, tensors = launch.Plan(grid=(1, 1, 1), sizes=(), constants={}), Compiler(), torch.zeros(2, 64)
        for tensor in tensors:
            plan.run(compiler, (tensor,))
        assert compiler.launched[0][-1] == tensors[1].data_ptr()

    def test_code_is_compiled_and_launched_on_the_device_of_its_tensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whichever is current: Triton takes that one, and code of one device fails on another's stream."""
        current, compiler = [0], Compiler()

        @contextmanager
        def on(device: int) -> Iterator[None]:
            current.append(device)
            yield
            current.pop()

        monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
        monkeypatch.setattr(torch.cuda, "device", on)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current[-1], raising=False)
        plan = launch.Plan(grid=(1, 1, 1), sizes=(), constants={})
        for _ in range(2):
            plan.run(compiler, (OnDevice(1),))
        assert compiler.num_compiled == 1
        assert compiler.launched[0][3] == 1  # the stream
        assert current == [0]

    def test_code_never_gets_the_address_of_a_tensor_that_lies_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Triton looks where tensors lie, and refuses those of the CPU; compiled code would read their addresses."""
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        plan, compiler = launch.Plan(grid=(1, 1, 1), sizes=(), constants={}), Compiler()
        plan.run(compiler, (OnDevice(0), OnDevice(0)))
        plan.run(compiler, (OnDevice(0), OnDevice(-1)))
        assert compiler.num_compiled == 2
        assert not compiler.launched

    @pytest.mark.parametrize("height", [1, 2])
    def test_the_distance_of_the_only_pixel_of_a_row_does_not_matter(self, height: int) -> None:
        """A map one pixel wide is contiguous with any distance, as one that was permuted to the channels' end."""
        plain = torch.randn(3, height, 1, 48, device=DEVICE)
        odd = plain.as_strided(plain.shape, (height * 48, 48, 1, 1))
        assert odd.is_contiguous()
        table, geometry = torch.zeros(2 * height - 1, 1, device=DEVICE), Geometry(rows=height, columns=1)
        found, wanted = (
            window_attention(qkv, table, geometry, scale_h=torch.ones(1, device=DEVICE)) for qkv in (odd, plain)
        )
        assert torch.equal(found, wanted)

    def test_constants_follow_the_kernels_declaration(self) -> None:
        """Compiled code takes them by place."""
        plan = launch.plan(
            torch.Size([1, 14, 14, 96]),
            torch.float32,
            2,
            (7, 7, 3, 3),
            backward=False,
            rolls_first=False,
            cosine=False,
            has_bias=False,
            drops=False,
            precision="ieee",
        )
        for code in (kernel.window_attention_forward, kernel.window_attention_backward):
            assert list(inspect.signature(code.fn).parameters)[-len(plan.constants) :] == list(plan.constants)
        table = launch.plan_of_table_gradient(2, 7, 7, 5)
        declared = list(inspect.signature(kernel.window_attention_table_gradient.fn).parameters)
        assert declared[-len(table.constants) :] == list(table.constants)
