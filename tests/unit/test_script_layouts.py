"""Rounding of convolutional nets in another memory layout, beside faults of about the same size."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_loops import FP32, Bench, failed
from torch import nn

from steptune.tuner.scripts.agent.changes import Changes
from steptune.tuner.scripts.agent.guard_watch import GuardWatch

NORMS = ("batch", "group", "instance", "layer", "none")


def norm_of(kind: str, width: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(width)
    if kind == "instance":
        return nn.InstanceNorm2d(width, affine=True)
    return nn.Identity() if kind == "none" else nn.GroupNorm(1 if kind == "layer" else 2, width)


@dataclass(frozen=True)
class Convolutions:
    """Loop of a small convolutional net, which may be wrong.

    Attributes:
        weight: Factor on the loss.
        eps: Factor on the small constant of the norms.
        excess: Factor on the gradient of the first convolution.
    """

    norm: str
    width: int = 8
    depth: int = 2
    size: int = 32
    batch: int = 16
    seed: int = 0
    channels_last: bool = False
    weight: float = 1.0
    eps: float = 1.0
    excess: float = 1.0
    dtype: torch.dtype | None = None

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        parts: list[nn.Module] = []
        for place in range(self.depth):
            parts += [
                nn.Conv2d(self.width if place else 3, self.width, 3, padding=1),
                norm_of(self.norm, self.width),
                nn.ReLU(),
            ]
        model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.width, 5))
        for part in model:
            if hasattr(part, "eps"):
                part.eps *= self.eps
        if self.excess != 1:
            model[0].weight.register_hook(lambda gradient: gradient * self.excess)
        return model

    def run(self, guard: GuardWatch) -> None:
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        guard.made_optimizer(optimizer, 0)
        changes = Changes({"channels_last": self.channels_last}, None, "", (0,), ("Sequential",))
        generator = torch.Generator().manual_seed(self.seed)
        while not guard.over:
            images = torch.randn(self.batch, 3, self.size, self.size, generator=generator)
            labels = torch.randint(5, (self.batch,), generator=generator)
            guard.called(model)
            changes.module(model)
            loss = self.weight * nn.functional.cross_entropy(model(images), labels)
            guard.loss(loss)
            loss.backward()
            optimizer.step()
            guard.step_ended(None)
            optimizer.zero_grad()


NETS: tuple[dict[str, Any], ...] = (
    {"width": 4, "size": 32, "batch": 32},
    {"width": 8, "size": 8, "batch": 8},
    {"width": 8, "size": 32, "batch": 8, "depth": 3},
    {"width": 16, "size": 64, "batch": 4},
)
HARDEST = [("batch", NETS[0], 0), ("batch", NETS[3], 0), ("group", NETS[0], 0)]
EVERY = [case for case in itertools.product(NORMS, NETS, range(4)) if case not in HARDEST]
CASES = [*HARDEST, *(pytest.param(*case, marks=pytest.mark.soak) for case in EVERY)]


@pytest.mark.parametrize(("norm", "net", "seed"), CASES)
def test_another_layout_is_told_from_faults_about_as_small(
    norm: str, net: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    """A batch norm over 32,768 positions rounds a gradient by 2e-6 of its size, or by 1e-2 where it nearly vanishes."""
    today = Convolutions(norm, seed=seed, **net)
    bench = Bench(tmp_path, today, (FP32,))
    same = bench.verdict(replace(today, channels_last=True))
    assert same.passed, same.reason
    faults: tuple[dict[str, Any], ...] = ({"weight": 1 + 3e-5}, {"excess": 1.01})
    for fault in faults:
        for channels_last in (False, True):
            assert failed(bench.verdict(replace(today, channels_last=channels_last, **fault))), fault
