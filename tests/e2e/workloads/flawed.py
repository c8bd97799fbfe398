"""A workload that is fine, and others that cannot be tuned, each for one reason."""

import time
from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from steptune import Workload

BATCH = 8
BAD_BATCH = 7


class Numbers(Dataset):
    def __init__(self, length=64):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((4,), float(index % 3)), index % 2


class Fine(Workload):
    global_batch = BATCH

    def model(self):
        return nn.Linear(4, 2)

    def dataset(self):
        return Numbers()

    def loss(self, model, batch):
        features, labels = batch
        return nn.functional.cross_entropy(model(features), labels)


class NotAWorkload:
    pass


class NanLoss(Fine):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")


class SmallerThanABatch(Fine):
    def dataset(self):
        return Numbers(BATCH - 3)


class DetachedLoss(Fine):
    def loss(self, model, batch):
        return super().loss(model, batch).detach()


class _Spoilt(Numbers):
    served = 0

    def __getitem__(self, index):
        self.served += 1
        if get_worker_info() is not None and self.served > (BAD_BATCH - 1) * BATCH:
            raise ValueError("this sample is damaged")
        return super().__getitem__(index)


class RaisingWorker(Fine):
    current: ClassVar = {"data_loading": {"num_workers": 1}}

    def dataset(self):
        return _Spoilt()


class UnknownChoice(Fine):
    current: ClassVar = {"data_loading": {"num_wrokers": 4}}


class EndlessStep(Fine):
    def loss(self, model, batch):
        while True:
            time.sleep(1)


class HugeModel(Fine):
    def model(self):
        return nn.Linear(4, 1 << 40)


class SlowStep(Fine):
    """Twelve of its steps are longer than a short budget."""

    def loss(self, model, batch):
        time.sleep(1)
        return super().loss(model, batch)


class Balanced(Fine):
    """Nothing can make it faster: its step is a sleep in the forward pass."""

    def loss(self, model, batch):
        time.sleep(0.02)
        return super().loss(model, batch)
