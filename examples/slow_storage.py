"""A small model whose samples come from slow storage, for which a sleep stands: every step waits for its data.

    steptune tune examples/slow_storage.py:SlowStorage --only data_loading --trials 3 --budget 4m

The wait itself needs no processor: the loader's workers wait side by side, on two cores as on many.
"""

import time

import torch
from torch import nn

import steptune

NUM_SAMPLES = 2_000


class Stored(torch.utils.data.Dataset):
    """Samples that take 40 ms each to come."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        time.sleep(0.04)
        sample = torch.full((64,), index / NUM_SAMPLES)
        return sample, sample[:8]


class SlowStorage(steptune.Workload):
    """Today's settings load in the main process, one sample after the other."""

    global_batch = 8

    def model(self):
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def dataset(self):
        return Stored()

    def loss(self, model, batch):
        samples, targets = batch
        return nn.functional.mse_loss(model(samples), targets)
