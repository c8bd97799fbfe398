"""Imports what nobody has."""

import package_that_nobody_has  # noqa: F401
import torch

import steptune


class Line(steptune.Workload):
    def model(self):
        return torch.nn.Linear(1, 1)

    def dataset(self):
        return torch.utils.data.TensorDataset(torch.randn(64, 1), torch.randn(64, 1))

    def loss(self, model, batch):
        return ((model(batch[0]) - batch[1]) ** 2).mean()
