"""State that a model keeps from step to step, as one step shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_workloads import Everything, TinyViT
from torch import nn

from steptune.tuner.records import ModelFacts
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.plan import Plan
from steptune.tuner.trials.model_look import look_at_model


class Averaging(nn.Module):
    """Keeps a moving average of its inputs, in place or in a new tensor, and a table that stays as it is."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = 0.1 * x.detach().mean()
        if self.in_place:
            self.average.mul_(0.9).add_(mean)
        else:
            self.average = 0.9 * self.average + mean
        return x * self.table[0]


def facts(*, in_blocks: nn.Module | None = None, at_the_end: nn.Module | None = None) -> ModelFacts:
    class Keeping(Everything):
        def model(self) -> nn.Module:
            model = TinyViT()
            for block in model.blocks:
                block.mlp.append(in_blocks or nn.Identity())
            model.head = nn.Sequential(model.head, at_the_end or nn.Identity())
            return model

    job = assemble(Keeping(), Plan(), device=torch.device("cpu"))
    return look_at_model(job, next(iter(job))).facts


class TokenNorm(nn.Module):
    """Batch normalisation over tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_blocks_change_are_named(in_place: bool) -> None:
    assert facts(in_blocks=Averaging(in_place=in_place)).block_state == "mlp.3.average"


def test_buffers_elsewhere_and_running_statistics_are_none() -> None:
    assert facts(at_the_end=Averaging(in_place=True)).block_state == ""
    assert facts(in_blocks=TokenNorm()).block_state == ""


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_normalisation_is_one_over_the_batch_whether_it_keeps_statistics_or_not(tracked: bool) -> None:
    assert facts(in_blocks=TokenNorm(track_running_stats=tracked)).has_batch_statistics
    assert not facts().has_batch_statistics


class Drawn(Everything):
    """A loss that draws noise, beside a model that draws some in training mode, always, or never."""

    def __init__(self, *, loss: bool = False, dropout: float = 0.0, always: bool = False) -> None:
        self.draws_in_loss, self.dropout, self.always = loss, dropout, always

    def model(self) -> nn.Module:
        model = TinyViT()
        model.head = nn.Sequential(model.head, nn.Dropout(self.dropout), Noise() if self.always else nn.Identity())
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        value = super().loss(model, batch)
        return value * (1 + 0.1 * torch.rand(())) if self.draws_in_loss else value


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("drawn", "randomness"),
    [
        ({}, "none"),
        ({"dropout": 0.5}, "switchable"),
        ({"always": True}, "always"),
        ({"loss": True}, "none"),
        ({"loss": True, "dropout": 0.5}, "switchable"),
        ({"loss": True, "always": True}, "always"),
    ],
)
def test_what_the_loss_draws_outside_of_the_model_is_not_its_randomness(drawn, randomness) -> None:
    """With one seed it is the same for every candidate, compiled or not."""
    job = assemble(Drawn(**drawn), Plan(), device=torch.device("cpu"))
    assert look_at_model(job, next(iter(job))).randomness == randomness
