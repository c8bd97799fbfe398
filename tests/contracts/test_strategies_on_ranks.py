"""Rules for every choice that only several ranks can make: it trains as one process does, within its numerics.

On two ranks, and on two emulated hosts with two ranks each.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from rank_jobs import DEFAULTS, Trained, emulated, train, train_alone
from ranks import Ranks
from test_strategies import CPU, EVERYTHING
from tiny_workloads import Everything, TinyViT, image_data
from torch import nn

from steptune.tuner.records import Choice, Environment, Numerics
from steptune.tuner.strategies import STRATEGIES, Strategy, Supported
from steptune.tuner.workloads.batches import part_of_rank

pytestmark = pytest.mark.xdist_group("ranks")

TWO = replace(CPU, num_ranks=2)
FOUR = replace(CPU, num_ranks=4, num_hosts=2)
ON_FOUR = ("sharding", "hierarchical_allreduce")
"""Strategies that are run on four ranks; of the others, only what two ranks cannot run is."""
LARGE = replace(EVERYTHING, model=replace(EVERYTHING.model, parameter_bytes=10**9))
"""Facts of a model that is large as far as strategies know: buckets of all sizes make sense for it."""


class Wide(Everything):
    """With matrices so wide that products of thin ones are smaller."""

    def model(self) -> nn.Module:
        return TinyViT(width=64)


TOLERANCE = 2e-5
"""Error of a loss near one after 20 updates of AdamW, each with some hundred roundings of FP32 in another order."""


def runs(strategy: Strategy, choice: Choice, environment: Environment) -> bool:
    return strategy.supports(choice, environment, LARGE) == Supported()


def choices_of_ranks(environment: Environment) -> list[Any]:
    return [
        pytest.param(strategy, choice, id=f"{strategy.name}-{'-'.join(str(value) for value in choice.values())}")
        for strategy in STRATEGIES
        for choice in strategy.choices(environment, LARGE)
        if choice != strategy.neutral(LARGE) and runs(strategy, choice, environment) and not runs(strategy, choice, CPU)
        if environment is TWO or strategy.name in ON_FOUR or not runs(strategy, choice, TWO)
    ]


@pytest.fixture(scope="module")
def alone() -> Trained:
    return train_alone(Wide)


def check(strategy: Strategy, choice: Choice, trained: Trained, alone: Trained) -> None:
    took, detail = trained.effects[strategy.name]
    assert took, detail
    assert all(math.isfinite(loss) for loss in trained.losses)
    assert trained.state.keys() == alone.state.keys()
    if strategy.numerics(choice) is Numerics.ROUNDING:
        assert trained.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    else:
        assert sum(trained.losses[-4:]) < sum(trained.losses[:4])


@pytest.mark.parametrize(("strategy", "choice"), choices_of_ranks(TWO))
def test_trains_as_one_process_does_and_shows_that_it_took_effect(
    ranks: Ranks, alone: Trained, strategy: Strategy, choice: Choice
) -> None:
    for trained in ranks.run(2, train, Wide, {strategy.name: choice}):
        check(strategy, choice, trained, alone)


@pytest.mark.parametrize(("strategy", "choice"), choices_of_ranks(FOUR))
def test_trains_so_on_two_hosts_too(ranks: Ranks, alone: Trained, strategy: Strategy, choice: Choice) -> None:
    for trained in ranks.run(4, emulated, 2, train, Wide, {strategy.name: choice}):
        check(strategy, choice, trained, alone)


class Partly(Wide):
    """A layer that no loss sees, one that is not trained, and a last batch that ranks cannot share evenly: of 21
    samples in batches of 8 it has 5, of which the first of four ranks takes two.
    """

    drop_last = False
    num_parts = 1

    def model(self) -> nn.Module:
        model = super().model()
        model.unused = nn.Linear(4, 4)
        model.blocks[0].requires_grad_(False)
        return model

    def dataset(self) -> Any:
        return image_data(num_samples=21)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """In one process the mean over the parts that ranks would have of their means."""
        images, labels = batch
        parts = [part_of_rank(len(labels), rank, self.num_parts) for rank in range(self.num_parts)]
        logits = model(images)
        losses = [F.cross_entropy(logits[part], labels[part]) for part in parts]
        return torch.stack(losses).mean()


class PartlyOfTwo(Partly):
    num_parts = 2


class PartlyOfFour(Partly):
    num_parts = 4


TECHNIQUES: dict[str, dict[str, Choice]] = {
    "ddp": {},
    "static_graph": {"ddp_buckets": {"static_graph": True}},
    "zero1": {"sharding": {"mode": "zero1"}},
    "grad_op": {"sharding": {"mode": "grad_op", "wrap": "block"}},
    "full": {"sharding": {"mode": "full", "wrap": "block"}},
    "without_norms": {"sharding": {"mode": "full", "wrap": "block", "ignored": "norms"}},
    "hybrid": {"sharding": {"mode": "hybrid", "wrap": "block"}},
    "hierarchical": {"hierarchical_allreduce": {"levels": 2}},
    "int8": {"gradient_compression": {"method": "int8"}},
    "one_bit": {"gradient_compression": {"method": "one_bit"}},
    "powersgd": {"gradient_compression": {"method": "powersgd", "rank": 2}},
    "local_sgd": {"local_sgd": {"every": 4, "warm_up_steps": 2}},
}
LOSSY = ("int8", "one_bit", "powersgd", "local_sgd")


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_unused_and_frozen_parameters_and_an_uneven_batch_train_as_in_one_process(
    ranks: Ranks, name: str, num_ranks: int
) -> None:
    if name in ("hybrid", "hierarchical") and num_ranks == 2:
        pytest.skip("two hosts with one rank each have nothing inside")
    choices = {"ddp_buckets": {"find_unused": True}, **TECHNIQUES[name]}
    alone = train_alone(PartlyOfTwo if num_ranks == 2 else PartlyOfFour)
    trained: Trained
    for trained in ranks.run(num_ranks, emulated, num_ranks // 2, train, Partly, choices):
        if name in LOSSY:
            assert sum(trained.losses[-6:]) < sum(trained.losses[:6])
        else:
            assert trained.losses == pytest.approx(alone.losses, rel=TOLERANCE)
        for key in ("unused.weight", "blocks.0.qkv.weight"):
            assert torch.equal(trained.state[key], alone.state[key])


def test_what_plain_pytorch_runs_trains_as_one_process_does_and_took_effect(ranks: Ranks, alone: Trained) -> None:
    for trained in ranks.run(2, train, Wide, {}):
        assert trained.losses == pytest.approx(alone.losses, rel=TOLERANCE)
        assert all(took for took, _ in trained.effects.values()), trained.effects


def test_a_choice_that_was_not_carried_out_is_noticed(ranks: Ranks) -> None:
    """Plain DDP, asked for the effect of every choice."""
    plain: Trained = ranks.run(2, train, Wide, {})[0]
    for case in (*choices_of_ranks(TWO), *choices_of_ranks(FOUR)):
        strategy, choice = case.values
        effect = strategy.took_effect(plain.evidence[strategy.name], choice)
        assert not effect.took, case.id
        assert effect.detail
    for strategy in STRATEGIES:
        assert strategy.took_effect(plain.evidence[strategy.name], DEFAULTS[strategy.name]).took
