"""Which implementations of experts a model offers, and switching them: ours, and those of transformers."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.experts import offered_implementations, use_implementation, used_implementation
from steptune.tuner.workloads.loading import load_workload

EXPERTS = "zoo:mixture_of_experts?batch=2&sequence=8&vocabulary=20&width=8&depth=2&num_heads=2&num_experts=3"
NUM_STEPS = 3


def losses(reference: str, execution: str | None) -> tuple[list[float], Any]:
    choices = {s.name: dict(s.defaults) for s in STRATEGIES} | {"moe_experts": {"execution": execution}}
    torch.manual_seed(0)
    job = assemble(load_workload(reference), make_plan(choices), device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(20, (2, 9), generator=generator)}
    return [float(job.step(batch)) for _ in range(NUM_STEPS)], job


class TestOwn:
    def test_offers_two_and_says_which_it_uses(self) -> None:
        model = load_workload(EXPERTS).model()
        assert offered_implementations(model) == ("looped", "batched")
        assert used_implementation(model) == "looped"
        assert used_implementation(use_implementation(model, "batched")) == "batched"

    def test_the_strategy_switches_and_training_stays_the_same(self) -> None:
        plain, _ = losses(EXPERTS, None)
        switched, job = losses(EXPERTS, "batched")
        assert switched == pytest.approx(plain, rel=1e-5)
        strategy = strategy_named("moe_experts")
        assert strategy.took_effect(strategy.evidence(job), {"execution": "batched"}).took
        assert not strategy.took_effect(strategy.evidence(job), {"execution": "looped"}).took
        assert strategy.took_effect(strategy.evidence(job), {"execution": None}).took


class TestOthers:
    def test_a_model_without_experts_offers_none(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        assert offered_implementations(model) == ()
        assert used_implementation(model) is None

    def test_layers_that_offer_different_ones_have_in_common_what_all_offer(self) -> None:
        first, second = nn.Linear(1, 1), nn.Linear(1, 1)
        for layer, names in ((first, ("looped", "grouped")), (second, ("looped", "batched"))):
            layer.expert_implementations = names  # type: ignore[assignment]
            layer.expert_implementation = names[1]  # type: ignore[assignment]
        model = nn.Sequential(first, second)
        assert offered_implementations(model) == ("looped",)
        assert used_implementation(model) is None


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
class TestTransformers:
    MIXTRAL = (
        "zoo:transformers?model_type=mixtral&batch=2&sequence=8&hidden_size=16&intermediate_size=16&num_hidden_layers=2"
        "&num_attention_heads=2&num_key_value_heads=2&num_local_experts=4&vocab_size=20"
    )

    @pytest.mark.parametrize("execution", ["looped", "batched", "grouped"])
    def test_the_strategy_switches_and_training_stays_the_same(self, execution: str) -> None:
        plain, _ = losses(self.MIXTRAL, "looped")
        switched, job = losses(self.MIXTRAL, execution)
        assert offered_implementations(job.model) == ("looped", "batched", "grouped")
        assert used_implementation(job.model) == execution
        assert switched == pytest.approx(plain, rel=1e-4)

    def test_one_without_experts_offers_none(self) -> None:
        model = load_workload("zoo:gpt2?n_layer=1&n_embd=8&n_head=2&vocab_size=20&n_positions=8").model()
        assert offered_implementations(model) == ()
