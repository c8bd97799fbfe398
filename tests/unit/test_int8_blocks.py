"""Blocks in 8 bits by their kernel: the error's bound, and numbers that are zero, tiny, huge or none."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from steptune.kernels import int8_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@given(st.integers(0, 40), st.sampled_from([1, 2, 16, 256]), st.integers(-36, 37), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_a_number_is_off_by_half_a_scale_at_most(num_rows: int, length: int, power: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(num_rows, length, generator=generator) * 10.0**power).to(DEVICE)
    payload, scales = int8_blocks.encode(rows)
    off = (payload.double() * scales.double()[:, None] - rows.double()).abs()
    assert bool((off <= 0.5001 * scales.double()[:, None]).all())
    again = int8_blocks.encode(rows)
    assert torch.equal(payload, again[0])
    assert torch.equal(scales, again[1])
    if num_rows:
        mean = int8_blocks.mean_of(torch.stack([payload, -payload]), torch.stack([scales, scales]))
        assert not mean.any()


def test_a_block_of_zeros_stays_zero() -> None:
    payload, scales = int8_blocks.encode(torch.zeros(3, 16, device=DEVICE))
    assert not payload.any()
    assert not int8_blocks.mean_of(payload[None], scales[None]).any()


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # of the interpreter, which computes by numpy
@pytest.mark.parametrize("broken", [float("inf"), -float("inf"), float("nan")])
def test_an_overflow_is_one_in_the_mean_and_in_no_other_block(broken: float) -> None:
    rows = torch.ones(2, 16, device=DEVICE)
    rows[1, 5] = broken
    payload, scales = int8_blocks.encode(rows)
    mean = int8_blocks.mean_of(payload[None], scales[None])
    assert torch.equal(mean[0], rows[0])
    assert not mean[1].isfinite().any()


def test_blocks_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="a power of two, got 12"):
        int8_blocks.encode(torch.ones(1, 12, device=DEVICE))
