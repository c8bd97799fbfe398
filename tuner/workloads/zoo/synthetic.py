"""Synthetic workload with steps of milliseconds and known costs, for tests and first tries.

Loading one sample sleeps, and so does the forward pass, so that the cost of a step hardly depends on
the machine:

    0 workers:   step = load_ms + compute_ms(threads)
    w workers:   step = max(load_ms / w, compute_ms(threads))
    cached:      step = compute_ms(threads)

`compute_ms` is multiplied by `single_thread_factor` when the operators use one thread.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
from torch import nn

from steptune.tuner.records import Choice
from steptune.tuner.workloads.workload import Workload


class _SleepyData:
    """Dataset of feature vectors and labels in which every access sleeps."""

    def __init__(self, length: int, features: int, sleep_s: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self._features = torch.randn(length, features, generator=generator)
        self._labels = (self._features[:, :3] @ torch.randn(3, 4, generator=generator)).argmax(1)
        self._sleep_s = sleep_s

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._sleep_s)
        return self._features[index], self._labels[index]


class _SleepyModel(nn.Module):
    """A small perceptron whose forward pass sleeps."""

    def __init__(self, features: int, sleep_s: float, single_thread_factor: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(features, features) for _ in range(3))
        self.head = nn.Linear(features, 4)
        self._sleep_s = sleep_s
        self._factor = single_thread_factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._sleep_s * (self._factor if torch.get_num_threads() == 1 else 1.0))
        for block in self.blocks:
            x = torch.relu(block(x))
        logits: torch.Tensor = self.head(x)
        return logits


class Synthetic(Workload):
    """Synthetic workload whose loading and forward pass sleep for given numbers of milliseconds."""

    current: ClassVar[dict[str, Choice]] = {}

    def __init__(
        self,
        batch: int = 8,
        load_ms: float = 4.0,
        compute_ms: float = 3.0,
        single_thread_factor: float = 1.0,
        length: int = 4096,
        features: int = 16,
        workers: int = 0,
    ) -> None:
        self.global_batch = batch
        self._load_s = load_ms / 1e3 / batch
        self._compute_s = compute_ms / 1e3
        self._factor = single_thread_factor
        self._length = length
        self._features = features
        if workers:
            self.current = {"data_loading": {"num_workers": workers}}  # type: ignore[misc]

    def model(self) -> nn.Module:
        return _SleepyModel(self._features, self._compute_s, self._factor)

    def dataset(self) -> Any:
        return _SleepyData(self._length, self._features, self._load_s)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        features, labels = batch
        return nn.functional.cross_entropy(model(features), labels)
