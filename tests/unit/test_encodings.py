"""Tensors in fewer bytes: what comes back, how far it is from what went in, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.training.encodings import (
    BLOCK,
    LEVELS,
    Blocks,
    Half,
    Sparse,
    Whole,
    flattened,
    is_dense,
    pack_bits,
    unpack_bits,
)

BF16_ROUNDOFF = 2.0**-8
counts = st.integers(1, 1000)


def layouts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 5, 7, 2, generator=generator)
    return {
        "contiguous": images,
        "channels_last": images.contiguous(memory_format=torch.channels_last),
        "transposed": images[0].transpose(0, 2),
        "single": torch.randn(1, generator=generator),
        "odd": torch.randn(BLOCK + 3, generator=generator),
    }


each_layout = pytest.mark.parametrize("name", list(layouts()))


def relu_like(count: int, seed: int, zeros: float = 0.6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(count, generator=generator)
    return torch.where(torch.rand(count, generator=generator) < zeros, 0.0, values)


class TestBits:
    @given(st.lists(st.booleans(), min_size=1, max_size=100))
    def test_come_back_as_they_were(self, bits: list[bool]) -> None:
        packed = pack_bits(torch.tensor(bits))
        assert packed.dtype is torch.uint8
        assert len(packed) == (len(bits) + 7) // 8
        assert unpack_bits(packed, len(bits)).tolist() == bits

    def test_the_first_is_the_lowest(self) -> None:
        assert pack_bits(torch.tensor([True, False, True] + 6 * [False])).tolist() == [5, 0]


class TestDense:
    @pytest.mark.parametrize(
        ("tensor", "dense"),
        [
            (torch.zeros(2, 3), True),
            (torch.zeros(2, 3).t(), True),
            (torch.zeros(2, 1, 3).expand(2, 4, 3), False),
            (torch.zeros(4, 4)[:, :2], False),
            (torch.zeros(4, 4)[::2], False),
            (torch.zeros(3, 1, 1), True),
            (torch.zeros(()), True),
        ],
    )
    def test_is_one_stretch_of_memory(self, tensor: torch.Tensor, dense: bool) -> None:
        assert is_dense(tensor) is dense


@each_layout
@pytest.mark.parametrize("form", [Sparse, Half, Blocks], ids=lambda form: form.__name__)
def test_what_comes_back_lies_in_memory_as_before(form: Any, name: str) -> None:
    """Or other kernels would run on it."""
    tensor = layouts()[name].relu()
    decoded = form.encode(tensor).decode()
    assert (decoded.shape, decoded.stride(), decoded.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)


class TestSparse:
    @given(count=counts, seed=st.integers(0, 100), zeros=st.floats(0, 1))
    def test_is_lossless(self, count: int, seed: int, zeros: float) -> None:
        tensor = relu_like(count, seed, zeros)
        assert torch.equal(Sparse.encode(tensor).decode(), tensor)

    def test_keeps_infinities_not_a_number_and_the_sign_of_zero(self) -> None:
        odd = torch.tensor([-0.0, float("nan"), float("inf"), -float("inf"), 1e-45])
        tensor = torch.cat([odd, torch.zeros(100)])
        form = Sparse.encode(tensor)
        assert isinstance(form, Sparse)
        assert torch.equal(form.decode().view(torch.int32), tensor.view(torch.int32))

    def test_takes_a_bit_each_and_the_rest(self) -> None:
        tensor = torch.zeros(800)
        tensor[:100] = 1.0
        assert Sparse.encode(tensor).num_bytes == 800 // 8 + 100 * 4

    def test_is_not_used_where_little_is_zero(self) -> None:
        tensor = torch.ones(100)
        form = Sparse.encode(tensor)
        assert isinstance(form, Whole)
        assert form.decode() is tensor

    def test_of_16_bits(self) -> None:
        tensor = relu_like(500, 1, 0.8).bfloat16()
        assert torch.equal(Sparse.encode(tensor).decode(), tensor)


class TestHalf:
    @given(count=counts, seed=st.integers(0, 100), scale=st.sampled_from([1e-20, 1.0, 1e30]))
    def test_is_within_a_roundoff(self, count: int, seed: int, scale: float) -> None:
        tensor = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
        error = (Half.encode(tensor).decode() - tensor).abs()
        assert (error <= BF16_ROUNDOFF * tensor.abs()).all()

    def test_takes_half(self) -> None:
        assert Half.encode(torch.zeros(100)).num_bytes == 200


class TestBlocks:
    @given(count=counts, seed=st.integers(0, 100), scale=st.sampled_from([1e-20, 1.0, 1e30]))
    def test_is_within_half_a_step_of_its_block(self, count: int, seed: int, scale: float) -> None:
        tensor = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
        error = (Blocks.encode(tensor).decode() - tensor).abs()
        for found, block in zip(error.split(BLOCK), tensor.split(BLOCK), strict=True):
            step = block.abs().max() / LEVELS
            assert (found <= step / 2 * (1 + 1e-5)).all()

    def test_a_block_of_large_values_does_not_blur_another(self) -> None:
        tensor = torch.cat([torch.full((BLOCK,), 1e6), torch.full((BLOCK,), 1e-6)])
        assert torch.allclose(Blocks.encode(tensor).decode(), tensor, rtol=1e-6, atol=0)

    def test_zero_stays_zero(self) -> None:
        tensor = relu_like(1000, 3)
        assert (Blocks.encode(tensor).decode()[tensor == 0] == 0).all()
        assert (Blocks.encode(torch.zeros(10)).decode() == 0).all()

    def test_infinite_values_stay_so_and_leave_the_others_of_their_block_alone(self) -> None:
        """Attention on CUDA keeps such values: sums of its rows, padded with infinities."""
        decoded = Blocks.encode(torch.tensor([0.0, -float("inf"), 5.0, float("inf"), -2.5])).decode()
        assert decoded.tolist() == [0.0, -float("inf"), 5.0, float("inf"), -2.5]

    def test_what_is_not_a_number_is_none_afterwards(self) -> None:
        decoded = Blocks.encode(torch.tensor([1.0, float("nan"), 0.5])).decode()
        assert decoded.isnan().tolist() == [False, True, False]
        assert decoded[::2].tolist() == [1.0, 0.5]

    def test_takes_a_byte_each_and_the_scales(self) -> None:
        assert Blocks.encode(torch.zeros(2 * BLOCK)).num_bytes == 2 * BLOCK + 2 * 4

    def test_of_16_bits_comes_back_so(self) -> None:
        tensor = torch.randn(300, generator=torch.Generator().manual_seed(0)).bfloat16()
        decoded = Blocks.encode(tensor).decode()
        assert decoded.dtype is torch.bfloat16
        assert torch.allclose(decoded.float(), tensor.float(), atol=float(tensor.abs().max()) / 127)


def test_flattening_shares_memory() -> None:
    tensor = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    flattened(tensor).fill_(1.0)
    assert (tensor == 1).all()
