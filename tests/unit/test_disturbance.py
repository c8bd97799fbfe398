"""Disturbing what rounding disturbs: by whom noise is shared, and by whom not."""

from typing import Any

import pytest
import torch
from torch import nn

from steptune.tuner.trials.disturbance import Disturbance

ONES = torch.ones(64)


def test_parameters_are_disturbed_alike_on_all_ranks_and_outputs_on_each_by_noise_of_its_own() -> None:
    ranks = [Disturbance(2.0**-8, seed=1) for _ in range(2)]
    parameters = [disturb(ONES) for disturb in ranks]
    assert torch.equal(*parameters)
    assert not torch.equal(parameters[0], ONES)
    outputs = [disturb.of_rank(rank)(ONES) for rank, disturb in enumerate(ranks)]
    assert not torch.equal(*outputs)


def test_the_noise_of_a_rank_repeats_itself() -> None:
    first, second = (Disturbance(2.0**-8, seed=1).of_rank(1)(ONES) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, Disturbance(2.0**-8, seed=2).of_rank(1)(ONES))


ROUNDOFFS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Unit roundoff of each format itself."""


def units(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """How many numbers of the format further, away from zero."""
    integers = torch.int32 if before.dtype is torch.float32 else torch.int16
    return after.view(integers).long() - before.view(integers).long()


class TestInTheFormatWhoseRoundoffItIs:
    """Where a factor rounded to the format itself would be 1 or, only ever, less."""

    @pytest.fixture(params=ROUNDOFFS, ids=str)
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        return request.param

    @pytest.fixture(params=["normal", "ones", "powers", "just below a power"])
    def values(self, request: pytest.FixtureRequest, dtype: torch.dtype) -> torch.Tensor:
        """Many; a power of two has a neighbour below that is half as far away as that above."""
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(100_000, generator=generator)
        found = {
            "normal": normal,
            "ones": torch.ones_like(normal),
            "powers": normal.sign() * torch.exp2((3 * normal).round()),
            "just below a power": normal.sign() * (2 - 2.5 * ROUNDOFFS[dtype]),
        }[request.param]
        return found.to(dtype)

    @pytest.mark.parametrize("seed", [1, 2])
    def test_most_elements_move_by_one_unit_in_the_last_place_as_often_up_as_down(
        self, values: torch.Tensor, seed: int
    ) -> None:
        roundoff = ROUNDOFFS[values.dtype]
        moved = Disturbance(roundoff, seed=seed)(values)
        distance = units(values, moved)
        assert set(distance.tolist()) <= {-1, 0, 1}
        assert float((distance != 0).double().mean()) > 0.5
        change = (moved.double() - values.double()) / values.double() / roundoff
        sigma = float(change.std()) / len(values) ** 0.5
        assert abs(float(change.mean())) < 4 * sigma
        assert float(change.abs().mean()) == pytest.approx(1.0, abs=0.02)
        if float((values.double().log2() % 1 != 0).double().mean()) > 0.9:
            assert abs(float(distance.sign().double().mean())) < 4 / len(values) ** 0.5

    def test_what_has_no_neighbours_stays(self, dtype: torch.dtype) -> None:
        special = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")], dtype=dtype)
        found = Disturbance(ROUNDOFFS[dtype], seed=1)(special)
        torch.testing.assert_close(found, special, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("roundoff", [2.0**-8, 2.0**-11])
def test_noise_in_a_finer_format_is_uniform_within_the_roundoff(dtype: torch.dtype, roundoff: float) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    change = (Disturbance(roundoff, seed=1)(values).double() / values.double() - 1) / roundoff
    assert float(change.abs().max()) <= 1.001
    assert float(change.abs().max()) > 0.99
    assert abs(float(change.mean())) < 4 * float(change.std()) / len(values) ** 0.5
    assert float(change.std()) == pytest.approx(3**-0.5, rel=0.02)


@pytest.mark.parametrize("dtype", ROUNDOFFS, ids=str)
def test_a_gradient_is_disturbed_by_the_factors_of_its_output(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    moved = Disturbance(ROUNDOFFS[dtype], seed=1)(values)
    moved.backward(values.detach())
    assert values.grad is not None
    change = units(moved.detach(), values.grad)
    assert set(change.tolist()) <= {-1, 0, 1}  # the saved factor has the format's own precision
    assert float((change == 0).double().mean()) > 0.9


def test_layouts_stay_and_pieces_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptune.tuner.trials.disturbance.PIECE", 7)
    image = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    for values in (image, image[..., ::2], image.transpose(0, 1), image[:, :1].expand(2, 4, 5, 5), torch.ones(())):
        found = Disturbance(2.0**-8, seed=1)(values)
        assert found.stride() == torch.empty_like(values).stride()
        torch.testing.assert_close(found, values, rtol=2.0**-7, atol=0)
        assert not torch.equal(found, values)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked by torch itself
def test_outputs_of_a_compiled_model_are_disturbed_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    compiled = torch.compile(model, backend="eager")
    batch = torch.randn(8, 4)
    expected = model(batch)
    with Disturbance(2.0**-8, seed=1).of_outputs(model):
        found = compiled(batch)
        found.sum().backward()
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(compiled(batch), expected)


class Seen(nn.BatchNorm2d):
    """Norm that remembers whether its input had channels last."""

    had_channels_last = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.had_channels_last = input.is_contiguous(memory_format=torch.channels_last)
        return super().forward(input)


class Pair(nn.BatchNorm2d):
    """Norm with a second output."""

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), input.mean()


class Flat(nn.BatchNorm2d):
    """Norm whose output has other dimensions."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).flatten(1)


@pytest.mark.parametrize("kind", [Pair, Flat])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_norm_with_outputs_of_its_own_runs_on(kind: type[nn.Module], layout: torch.memory_format) -> None:
    norm = kind(3)
    images = torch.randn(4, 3, 6, 6).to(memory_format=layout)
    expected = norm(images)
    with Disturbance(2.0**-24, seed=1).of_outputs(norm):
        torch.testing.assert_close(norm(images), expected, rtol=1e-5, atol=1e-5)


def test_the_output_of_a_norm_on_a_slice_can_be_viewed() -> None:
    """A slice has neither layout; its norm's output is contiguous."""
    images = torch.randn(4, 6, 5, 5)[:, ::2]
    norm = nn.BatchNorm2d(3)
    with Disturbance(2.0**-24, seed=1).of_outputs(norm):
        assert norm(images).view(4, -1).shape == (4, 75)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_norm_computes_in_the_layout_that_it_does_not_have(layout: torch.memory_format) -> None:
    """Kernels for one layout round sums over positions otherwise than those for another."""
    norm = Seen(3)
    images = torch.randn(4, 3, 6, 6).to(memory_format=layout).requires_grad_()
    with Disturbance(2.0**-24, seed=1).of_outputs(norm):
        found = norm(images)
        found.square().sum().backward()
    assert norm.had_channels_last == (layout is torch.contiguous_format)
    assert found.is_contiguous(memory_format=layout)
    norm(images)
    assert norm.had_channels_last == (layout is torch.channels_last)
