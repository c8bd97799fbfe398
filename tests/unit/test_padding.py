"""Products at padded sizes: the same function with the same gradients, of the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import sample_breakdown, sample_environment, sample_facts
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Calibration, Choice
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.situations import computation_of
from steptune.tuner.training.casting import cast_model
from steptune.tuner.training.padding import PaddedLinear, pad_linears, padded_size, unaligned_linears

EXACT = {"rtol": 1e-12, "atol": 1e-13}
"""float64; the library may add in another order."""


class Language(nn.Module):
    """An embedding, a layer of odd widths, and an output layer that is tied to the embedding."""

    def __init__(self, vocabulary: int = 37, width: int = 12, hidden: int = 19) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def batch(vocabulary: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (3, 11), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, vocabulary: int = 37) -> torch.Tensor:
    tokens, targets = batch(vocabulary)
    logits = model(tokens)
    assert logits.shape == (*tokens.shape, vocabulary)
    return F.cross_entropy(logits.view(-1, vocabulary), targets.reshape(-1))


class TestSizes:
    @pytest.mark.parametrize(
        ("size", "multiple", "padded"),
        [(8, 8, 8), (50257, 8, 50264), (50257, 64, 50304), (1000, 64, 1024), (65, 64, 72), (4, 64, 8), (512, 64, 512)],
    )
    def test_are_the_next_multiple_unless_that_is_far(self, size: int, multiple: int, padded: int) -> None:
        assert padded_size(size, multiple) == padded

    @given(st.integers(1, 10**6), st.sampled_from([8, 64]))
    def test_are_multiples_of_8_and_little_more_than_asked_for(self, size: int, multiple: int) -> None:
        padded = padded_size(size, multiple)
        assert padded % 8 == 0
        assert size <= padded <= max(size + 7, size * 9 / 8)


class TestFunction:
    @pytest.mark.parametrize("multiple", [8, 64])
    def test_loss_and_gradients_are_those_of_the_model_as_it_was(self, multiple: int) -> None:
        """The vocabulary's included: the padded classes enter no sum of the softmax."""
        torch.manual_seed(0)
        plain = Language().double()
        padded = pad_linears(copy.deepcopy(plain), multiple)
        assert isinstance(padded.head, PaddedLinear)
        losses = [loss_of(model) for model in (plain, padded)]
        torch.testing.assert_close(losses[1], losses[0], **EXACT)
        for loss in losses:
            loss.backward()
        for (name, ours), theirs in zip(padded.named_parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, **EXACT, msg=lambda m, name=name: f"{name}: {m}")

    @given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.sampled_from([(5,), (2, 3), ()]))
    def test_of_any_sizes(self, inputs: int, outputs: int, bias: bool, leading: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        plain = nn.Linear(inputs, outputs, bias=bias).double()
        padded = pad_linears(nn.Sequential(copy.deepcopy(plain)), 8)
        x = torch.randn(*leading, inputs, dtype=torch.float64)
        first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
        results = plain(first), padded(second)
        torch.testing.assert_close(results[1], results[0], **EXACT)
        for result in results:
            result.square().sum().backward()
        torch.testing.assert_close(second.grad, first.grad, **EXACT)
        for ours, theirs in zip(padded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)

    def test_in_autocast_the_product_has_padded_sizes_in_16_bits(self) -> None:
        model = pad_linears(nn.Sequential(nn.Linear(12, 37)), 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(torch.ones(4, 12))
        assert result.dtype == torch.bfloat16
        assert result.shape == (4, 37)
        assert result.stride() == (40, 1)

    def test_of_a_model_cast_to_16_bits(self) -> None:
        model = cast_model(pad_linears(Language(), 8), "bfloat16", keep_fp32=True)
        assert torch.isfinite(loss_of(model))

    def test_gpt2_of_transformers_gives_the_same_loss(self) -> None:
        """Its output layer is tied, and its loss shifts and flattens the logits in its own way."""
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(vocab_size=101, n_embd=24, n_layer=1, n_head=2, n_positions=16)
        torch.manual_seed(0)
        plain = transformers.GPT2LMHeadModel(config).eval()
        padded = pad_linears(copy.deepcopy(plain), 8)
        assert isinstance(padded.lm_head, PaddedLinear)
        assert padded.lm_head.weight is padded.transformer.wte.weight
        tokens = torch.randint(101, (2, 16), generator=torch.Generator().manual_seed(0))
        losses = [model(input_ids=tokens, labels=tokens).loss for model in (plain, padded)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


class TestEligible:
    def test_parameters_keep_identity_and_names(self) -> None:
        model = Language()
        before = {name: id(p) for name, p in model.named_parameters()}
        state = list(model.state_dict())
        pad_linears(model, 8)
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert list(model.state_dict()) == state

    def test_aligned_layers_and_subclasses_stay(self) -> None:
        class Own(nn.Linear):
            pass

        attention = nn.MultiheadAttention(6, 2)
        model = nn.ModuleList([nn.Linear(16, 8), Own(3, 5), attention, nn.Embedding(5, 3)])
        kinds: list[Any] = [type(module) for module in model.modules()]
        assert unaligned_linears(model, 8) == []
        pad_linears(model, 8)
        assert [type(module) for module in model.modules()] == kinds

    def test_a_layer_of_which_one_size_is_odd_is_found(self) -> None:
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 10), nn.Linear(10, 8))
        assert unaligned_linears(model, 8) == [model[1], model[2]]


class TestBound:
    """Bound of a step that is all matrix products, without a roofline."""

    @pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (1 / 17, 0.5), (0.5, 16 / 17), (1.0, 1.0)])
    def test_is_the_part_of_the_layers_with_odd_sizes_were_they_16_times_as_slow(
        self, share: float, expected: float
    ) -> None:
        assert strategy_named("model_recipe").bound(products_of(share), PADDED) == pytest.approx(expected)


class TestExpected:
    """Expectation of a language model whose vocabulary is odd: three tenths of the arithmetic."""

    def test_most_of_what_odd_sizes_cost_tensor_cores(self) -> None:
        recipe = strategy_named("model_recipe")
        sixteen = recipe.expected(products_of(0.3, precision={"level": "O1", "dtype": "bfloat16"}), PADDED)
        tf32 = recipe.expected(products_of(0.3, precision={"level": "tf32", "dtype": None}), PADDED)
        fp32 = recipe.expected(products_of(0.3), PADDED)
        assert sixteen == pytest.approx(0.7 * 5 * 0.3 / (6 * 0.3 + 0.7))
        assert sixteen > tf32 > fp32 == pytest.approx(0.005)

    def test_nothing_where_the_compiler_sees_the_whole_model_and_pads_itself(self) -> None:
        recipe = strategy_named("model_recipe")
        precision = {"level": "O1", "dtype": "bfloat16"}
        whole = {"mode": "default", "scope": "whole", "dynamic": None}
        assert recipe.expected(products_of(0.3, precision=precision, compile=whole), PADDED) == pytest.approx(0.005)
        regional = products_of(0.3, precision=precision, compile={**whole, "scope": "regional"})
        assert recipe.expected(regional, PADDED) > 0.3


PADDED = {"pad_multiple": 8, "pooled_classifier": False}


def products_of(unaligned: float, **choices: Choice) -> Situation:
    """A step of matrix products, of whose arithmetic a part has odd sizes."""
    facts = sample_facts()
    facts = replace(facts, model=replace(facts.model, flops_per_step=None, unaligned_flops={"8": unaligned}))
    breakdown = sample_breakdown(
        categories={Category.MATMUL.value: 100},
        num_steps=1,
        step_time_ns=100,
        rescaled={},
        unprofiled_step_time_ns=None,
    )
    return Situation(
        breakdown=breakdown,
        workload=facts,
        environment=replace(sample_environment("cpu"), calibration=Calibration()),
        choices={**{s.name: dict(s.defaults) for s in STRATEGIES}, **choices},
        computation=computation_of(choices),
    )
