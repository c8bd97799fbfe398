"""Dropout that is called as a function: counted place by place, and left alone in compiled code and under `vmap`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import FP32, PROTOCOL, make_study
from guarded_trainings import NUM_CLASSES, Training
from msgspec.structs import replace
from torch import nn
from torch.nn import functional

SHORT = replace(PROTOCOL, num_pointwise=4, num_curve=8, num_horizon=0)
WIDE, NARROW = 4096, 512


class Places(nn.Module):
    """Two rates over tensors of different sizes in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, WIDE), nn.Linear(WIDE, NARROW)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        wide = functional.dropout(self.up(values).tanh(), 0.1, self.training)
        return functional.dropout(self.down(wide), 0.5, self.training)


class TwoRates(Training):
    def model(self) -> nn.Module:
        return nn.Sequential(Places(), nn.Linear(NARROW, NUM_CLASSES))


class Narrow(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(16, 64), nn.Linear(64, NUM_CLASSES), between

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(values), self.training))  # type: ignore[no-any-return]


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled(values: torch.Tensor, training: bool) -> torch.Tensor:
    return functional.dropout(functional.gelu(values), 0.2, training)


def by_sample(values: torch.Tensor, training: bool) -> torch.Tensor:
    return torch.func.vmap(lambda row: functional.dropout(row, 0.2, training), randomness="different")(values)


class Compiled(Training):
    def model(self) -> nn.Module:
        return Narrow(compiled)


class BySample(Training):
    def model(self) -> nn.Module:
        return Narrow(by_sample)


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch": {"num_micro_batches": 4}},
        {"micro_batch": {"num_micro_batches": 2}, "activation_checkpointing": {"every": 1}},
    ],
)
def test_parts_of_a_batch_weigh_calls_otherwise_and_pass(tmp_path: Path, change: dict[str, Any]) -> None:
    study = make_study(tmp_path / "study", TwoRates, protocol=SHORT, unit_roundoffs=(FP32,))
    assert {name: round(masks.mean, 1) for name, masks in study.reference.masks.items()} == {
        "dropout 1 called in 0": 0.1,
        "dropout 2 called in 0": 0.5,
    }
    assert study.failed(study.job(**change), unit_roundoff=FP32) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("training", [Compiled, BySample])
def test_calls_that_nobody_may_look_into_are_left_alone(tmp_path: Path, training: type[Training]) -> None:
    study = make_study(tmp_path / "study", training, protocol=SHORT, unit_roundoffs=(FP32,))
    assert study.failed(study.job(), unit_roundoff=FP32) == []
