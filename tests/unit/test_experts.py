"""Layers of experts, against what GShard and Switch say, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptune.tuner.workloads.loading import load_workload
from steptune.tuner.workloads.zoo.experts import ExpertLayer, balance_loss, capacity_of, route


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """Logits, how many experts a token chooses, and a capacity."""
    num_tokens, num_experts = draw(st.integers(1, 24)), draw(st.integers(2, 6))
    top_k = draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    skew = draw(st.sampled_from([0.0, 4.0]))
    logits = torch.randn(num_tokens, num_experts, generator=generator) + skew * torch.arange(num_experts)
    return logits, top_k, draw(st.integers(1, num_tokens))


def slow_route(logits: torch.Tensor, top_k: int, capacity: int) -> dict[tuple[int, int], tuple[int, int, float]]:
    """Expert, place in it, and weight by token and choice; only of those that are kept."""
    probabilities = [[math.exp(v) / sum(math.exp(w) for w in row) for v in row] for row in logits.double().tolist()]
    order = [sorted(range(len(row)), key=lambda e: -row[e])[:top_k] for row in probabilities]
    taken = [0] * logits.shape[1]
    kept = {}
    for choice in range(top_k):
        for token, row in enumerate(probabilities):
            expert = order[token][choice]
            weight = row[expert] / (sum(row[e] for e in order[token]) if top_k == 2 else 1.0)
            if taken[expert] < capacity:
                kept[token, choice] = (expert, taken[expert], weight)
            taken[expert] += 1
    return kept


class TestRouting:
    @given(routings())
    @settings(max_examples=60, deadline=None)
    def test_is_what_a_loop_over_tokens_gives(self, case: tuple[torch.Tensor, int, int]) -> None:
        logits, top_k, capacity = case
        found, expected = route(logits, top_k, capacity), slow_route(logits, top_k, capacity)
        assert {tuple(place) for place in found.kept.nonzero().tolist()} == set(expected)
        for (token, choice), (expert, place, weight) in expected.items():
            assert int(found.experts[token, choice]) == expert
            assert int(found.positions[token, choice]) == place
            assert float(found.weights[token, choice]) == pytest.approx(weight, rel=1e-5)

    @given(routings())
    @settings(max_examples=60, deadline=None)
    def test_no_expert_takes_more_than_its_capacity(self, case: tuple[torch.Tensor, int, int]) -> None:
        logits, top_k, capacity = case
        found = route(logits, top_k, capacity)
        for expert in range(logits.shape[1]):
            chosen = found.experts == expert
            assert int((chosen & found.kept).sum()) == min(capacity, int(chosen.sum()))

    def test_first_choices_come_before_second_ones(self) -> None:
        """Both tokens choose both experts, the other way around; there is room for one each."""
        found = route(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), top_k=2, capacity=1)
        assert found.kept.tolist() == [[True, False], [True, False]]

    def test_weights_of_two_choices_add_up_to_one_and_that_of_one_is_its_probability(self) -> None:
        logits = torch.tensor([[2.0, 1.0, 0.0]])
        assert float(route(logits, 2, 3).weights.sum()) == pytest.approx(1.0)
        assert float(route(logits, 1, 3).weights) == pytest.approx(math.exp(2) / (math.exp(2) + math.e + 1))

    @pytest.mark.parametrize(
        ("num_tokens", "num_experts", "top_k", "factor", "expected"),
        [(64, 8, 1, 1.0, 8), (64, 8, 2, 1.0, 16), (64, 8, 1, 1.25, 10), (10, 8, 1, 1.0, 2), (1, 8, 1, 0.1, 1)],
    )
    def test_capacity_is_the_even_share_times_the_factor(
        self, num_tokens: int, num_experts: int, top_k: int, factor: float, expected: int
    ) -> None:
        assert capacity_of(num_tokens, num_experts, top_k, factor) == expected


class TestBalance:
    @given(routings())
    @settings(max_examples=30, deadline=None)
    def test_is_switch_s_formula(self, case: tuple[torch.Tensor, int, int]) -> None:
        """E times the sum over experts of f_e P_e."""
        logits, top_k, capacity = case
        num_tokens, num_experts = logits.shape
        probabilities = logits.double().softmax(1)
        f = [sum(int(row.argmax()) == e for row in probabilities) / num_tokens for e in range(num_experts)]
        p = [float(probabilities[:, e].mean()) for e in range(num_experts)]
        expected = num_experts * sum(a * b for a, b in zip(f, p, strict=True))
        assert float(route(logits, top_k, capacity).balance) == pytest.approx(expected, rel=1e-5)

    def test_is_one_when_all_are_used_alike_and_e_when_one_is(self) -> None:
        even = torch.full((4, 4), 0.25)
        assert float(balance_loss(even, torch.arange(4))) == pytest.approx(1.0)
        all_to_one = torch.eye(4)[torch.zeros(4, dtype=torch.int64)]
        assert float(balance_loss(all_to_one, torch.zeros(4, dtype=torch.int64))) == pytest.approx(4.0)


def layer(top_k: int, factor: float, implementation: str = "looped") -> ExpertLayer:
    torch.manual_seed(0)
    made = ExpertLayer(6, 12, num_experts=3, top_k=top_k, capacity_factor=factor, implementation=implementation)
    with torch.no_grad():
        made.router.weight.mul_(10)  # far from even, so that some tokens find their expert full
    return made


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
class TestLayer:
    def test_adds_up_the_outputs_of_the_chosen_experts(self, top_k: int, factor: float) -> None:
        """Token by token; one that finds its experts full gives zeros."""
        made = layer(top_k, factor)
        x = torch.randn(2, 5, 6)
        out, _, num_dropped = made(x)
        tokens = x.view(10, 6)
        capacity = capacity_of(10, 3, top_k, factor)
        kept = slow_route(tokens @ made.router.weight.t(), top_k, capacity)
        expected = torch.zeros(10, 6)
        for (token, _), (expert, _, weight) in kept.items():
            expected[token] += weight * made.experts.one(expert, tokens[token : token + 1])[0]
        torch.testing.assert_close(out.view(10, 6), expected)
        assert int(num_dropped) == top_k * 10 - len(kept)

    def test_batched_experts_compute_what_looped_ones_do(self, top_k: int, factor: float) -> None:
        looped, batched = layer(top_k, factor), layer(top_k, factor, "batched")
        x = torch.randn(2, 7, 6)
        results = []
        for made in (looped, batched):
            inputs = x.clone().requires_grad_()
            out, balance, num_dropped = made(inputs)
            (out.square().sum() + balance).backward()
            results.append((out, balance, num_dropped, inputs.grad, *(p.grad for p in made.parameters())))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)

    def test_at_16_bits_the_router_chooses_in_fp32(self, top_k: int, factor: float) -> None:
        for implementation in ("looped", "batched"):
            made = layer(top_k, factor, implementation)
            x = torch.randn(2, 5, 6)
            assert made.router(x.bfloat16()).dtype == torch.float32
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert made.router(x.bfloat16()).dtype == torch.float32
                out, _, _ = made(x)
            reference, _, _ = made(x)
            torch.testing.assert_close(
                out.float(), reference, rtol=0.05, atol=0.01 * float(reference.detach().abs().max())
            )


def test_dropped_tokens_are_counted_by_the_model() -> None:
    """With room for one in sixteen, 8 tokens of 3 experts in two layers lose most of their choices."""
    workload = load_workload(
        "zoo:mixture_of_experts?batch=1&sequence=8&vocabulary=9&width=8&depth=2&num_heads=2&num_experts=3"
        "&capacity_factor=0.1&top_k=1"
    )
    model = workload.model()
    _, _, num_dropped = model(torch.arange(8)[None] % 9)
    assert 2 * (8 - 3) <= int(num_dropped) <= 2 * (8 - 1)
