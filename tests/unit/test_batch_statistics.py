"""Batch normalisation: what a candidate does to running statistics, and to the batch that they are of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded import BF16, FP32, PROTOCOL, Study, make_study
from guarded_trainings import Convolutional
from msgspec.structs import replace
from torch import nn

from steptune.tuner.strategies import strategy_named
from steptune.tuner.strategies.api import Unsupported
from steptune.tuner.trials.fake import fake_environment, fake_workload

O1: dict[str, Any] = {"precision": {"level": "O1", "dtype": "bfloat16"}}
HALVES: dict[str, Any] = {"micro_batch": {"num_micro_batches": 2}}
SHORT = replace(PROTOCOL, num_pointwise=4, num_curve=0, num_horizon=0)


class HalfStatistics(nn.BatchNorm2d):
    """Normalises by the whole batch, and keeps statistics of its first half."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        assert variance is not None
        result = nn.functional.batch_norm(value, None, None, self.weight, self.bias, training=True, eps=self.eps)
        with torch.no_grad():
            half = value[: len(value) // 2].float().transpose(0, 1).flatten(1)
            for buffer, now in zip((mean, variance), (half.mean(1), half.var(1)), strict=True):
                buffer.lerp_(now, 0.1)
        return result


def with_norms(change: Any) -> Convolutional:
    class Changed(Convolutional):
        def model(self) -> nn.Module:
            model = super().model()
            for place, module in enumerate(model):
                if isinstance(module, nn.BatchNorm2d):
                    model[place] = change(module)
            return model

    return Changed()


def momentum(value: float | None) -> Any:
    def change(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
        norm.momentum = value
        return norm

    return change


def half(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    return HalfStatistics(norm.num_features)


FAULTS = {
    "momentum 3 % off": momentum(0.103),
    "momentum 10 % off": momentum(0.11),
    "never updated": momentum(0.0),
    "averaged over all steps": momentum(None),
    "of half of the batch": half,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("whole") / "study", Convolutional, protocol=SHORT)


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Today's settings cut the batch into two."""
    directory = tmp_path_factory.mktemp("halved") / "study"
    return make_study(directory, Convolutional, protocol=SHORT, choices=HALVES, unit_roundoffs=(FP32,))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("level", ["FP32", "O1"])
def test_statistics_that_are_kept_otherwise_are_rejected(whole: Study, fault: str, level: str) -> None:
    choices, roundoff = ({}, FP32) if level == "FP32" else (O1, BF16)
    job = whole.job(with_norms(FAULTS[fault]), **choices)
    assert "untrained state" in whole.failed(job, unit_roundoff=roundoff, choices=choices)


@pytest.mark.parametrize("level", ["FP32", "O1"])
def test_the_same_statistics_pass(whole: Study, level: str) -> None:
    choices, roundoff = ({}, FP32) if level == "FP32" else (O1, BF16)
    assert whole.failed(whole.job(**choices), unit_roundoff=roundoff, choices=choices) == []


@pytest.mark.parametrize("level", ["FP32", "O1"])
def test_a_batch_in_pieces_is_rejected(whole: Study, level: str) -> None:
    """Each piece is normalised by its own statistics, and moves the running ones."""
    choices, roundoff = (HALVES, FP32) if level == "FP32" else ({**HALVES, **O1}, BF16)
    assert "untrained state" in whole.failed(whole.job(**choices), unit_roundoff=roundoff, choices=choices)


@pytest.mark.parametrize(("today", "choice"), [(1, 2), (2, 1), (4, 2)])
def test_other_pieces_than_today_are_no_choice(today: int, choice: int) -> None:
    facts = fake_workload()
    model = replace(facts.model, has_batch_statistics=True)
    facts = replace(facts, model=model, batch_splittable=True, current={"micro_batch": {"num_micro_batches": today}})
    strategy = strategy_named("micro_batch")
    support = strategy.supports({"num_micro_batches": choice}, fake_environment(), facts)
    assert isinstance(support, Unsupported)
    assert "batch normalisation" in support.reason


def test_pieces_of_today_pass_and_the_whole_batch_is_rejected(halved: Study) -> None:
    assert halved.failed(halved.job(**HALVES), choices=HALVES) == []
    assert "untrained state" in halved.failed(halved.job(), choices={})
