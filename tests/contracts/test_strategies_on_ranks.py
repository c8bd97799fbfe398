"""What holds for every choice that only several ranks can make: it trains as one process does, within its numerics."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace
from rank_jobs import DEFAULTS, Trained, train, train_alone
from ranks import Ranks
from test_strategies import CPU, EVERYTHING
from tiny_workloads import Everything, TinyViT
from torch import nn

from tuner.records import Choice, Numerics
from tuner.strategies import STRATEGIES, Strategy, Supported

pytestmark = pytest.mark.xdist_group("ranks")

TWO = replace(CPU, num_ranks=2)
LARGE = replace(EVERYTHING, model=replace(EVERYTHING.model, parameter_bytes=10**9))
"""As far as strategies know: buckets of all sizes make sense for it."""


class Wide(Everything):
    """With matrices so wide that products of thin ones are smaller."""

    def model(self) -> nn.Module:
        return TinyViT(width=64)


TOLERANCE = 2e-5
"""Of a loss near one after 20 updates of AdamW, each with some hundred roundings of FP32 in another order."""


def choices_of_ranks() -> list[Any]:
    return [
        pytest.param(strategy, choice, id=f"{strategy.name}-{'-'.join(str(value) for value in choice.values())}")
        for strategy in STRATEGIES
        for choice in strategy.choices(TWO, LARGE)
        if choice != strategy.neutral(LARGE)
        and strategy.supports(choice, TWO, LARGE) == Supported()
        and strategy.supports(choice, CPU, LARGE) != Supported()
    ]


each_choice = pytest.mark.parametrize(("strategy", "choice"), choices_of_ranks())


@pytest.fixture(scope="module")
def alone() -> Trained:
    return train_alone(Wide)


@each_choice
def test_trains_as_one_process_does_and_shows_that_it_took_effect(
    ranks: Ranks, alone: Trained, strategy: Strategy, choice: Choice
) -> None:
    trained: Trained
    for trained in ranks.run(2, train, Wide, {strategy.name: choice}):
        took, detail = trained.effects[strategy.name]
        assert took, detail
        assert all(math.isfinite(loss) for loss in trained.losses)
        assert trained.state.keys() == alone.state.keys()
        if strategy.numerics(choice) is Numerics.ROUNDING:
            assert trained.losses == pytest.approx(alone.losses, rel=TOLERANCE)
        else:
            assert sum(trained.losses[-4:]) < sum(trained.losses[:4])


def test_what_plain_pytorch_runs_trains_as_one_process_does_and_took_effect(ranks: Ranks, alone: Trained) -> None:
    for trained in ranks.run(2, train, Wide, {}):
        assert trained.losses == pytest.approx(alone.losses, rel=TOLERANCE)
        assert all(took for took, _ in trained.effects.values()), trained.effects


def test_a_choice_that_was_not_carried_out_is_noticed(ranks: Ranks) -> None:
    """Plain DDP, asked for the effect of every choice."""
    plain: Trained = ranks.run(2, train, Wide, {})[0]
    for case in choices_of_ranks():
        strategy, choice = case.values
        effect = strategy.took_effect(plain.evidence[strategy.name], choice)
        assert not effect.took, case.id
        assert effect.detail
    for strategy in STRATEGIES:
        assert strategy.took_effect(plain.evidence[strategy.name], DEFAULTS[strategy.name]).took
