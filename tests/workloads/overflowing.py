"""A training that leaves the range of float16, and not that of bfloat16, at its third step."""

import torch
from torch.utils.data import TensorDataset

import steptune

LARGEST_FLOAT16 = 65504


class Overflowing(steptune.Workload):
    """One weight, which every input passes on: 30,000 at first, 55,000 and 73,000 after one update and two."""

    global_batch = 4

    def model(self):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, 3e4)
        return model

    def dataset(self):
        return TensorDataset(torch.ones(64, 1))

    def loss(self, model, batch):
        return (model(batch[0]).float() / 6e4 - 2).square().mean()

    def optimizer(self, named_parameters):
        return torch.optim.SGD([p for _, p in named_parameters], lr=5e8)
