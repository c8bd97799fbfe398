"""Workloads that cannot be trained as they are, each for one reason."""

import time
from typing import ClassVar

import torch
from regression import Numbers, Regression
from torch.utils.data import get_worker_info


class NanFromTheStart(Regression):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")


class Detached(Regression):
    """The loss is computed from the output, but no gradient flows."""

    def loss(self, model, batch):
        return super().loss(model, batch).detach()


class Constant(Regression):
    """The loss requires a gradient, but not that of any parameter of the model."""

    def loss(self, model, batch):
        return torch.ones((), requires_grad=True) * 2


class NotScalar(Regression):
    def loss(self, model, batch):
        inputs, targets = batch
        return (model(inputs) - targets).pow(2)


class NoParameters(Regression):
    def model(self):
        return torch.nn.ReLU()


class EndlessStep(Regression):
    def loss(self, model, batch):
        while True:
            time.sleep(1)


class DamagedInWorker(Regression):
    """Its own loader has a worker, which raises on the seventh batch."""

    current: ClassVar = {"data_loading": {"num_workers": 1}}

    def dataset(self):
        return DamagedNumbers(self.length)


class Ragged(Regression):
    """Its samples are of several lengths."""

    def dataset(self):
        return [torch.ones(8 + number % 2) for number in range(self.length)]


class RaggedInWorker(Ragged):
    current: ClassVar = {"data_loading": {"num_workers": 1}}


class DamagedNumbers(Numbers):
    given = 0

    def __getitem__(self, index):
        self.given += 1
        if get_worker_info() is not None and self.given > 48:
            raise ValueError(f"sample {index} is damaged")
        return super().__getitem__(index)


class TooLarge(Regression):
    def model(self):
        return torch.nn.Linear(1 << 20, 1 << 20)


class NotAWorkload:
    pass
