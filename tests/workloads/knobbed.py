"""A training script's own class, as somebody wrote it before Steptune: arguments in `__init__`, helpers outside."""

import time

import torch

from steptune import Workload

PIECE_S = 0.002
"""A piece waits so long, as for a remote service."""


def in_pieces(model, inputs, targets, num_pieces):
    """Mean squared error, piece by piece."""
    losses = []
    for part, wanted in zip(inputs.chunk(num_pieces), targets.chunk(num_pieces), strict=True):
        time.sleep(PIECE_S)
        losses.append(((model(part) - wanted) ** 2).sum())
    return torch.stack(losses).sum() / targets.numel()


class Pieces(Workload):
    global_batch = 8
    knobs = {"num_pieces": (1, 4, 8), "offset": {0.0, 0.5}}  # noqa: RUF012 (as users write it)
    recipe_knobs = {"smoothing": [0.0, 0.1]}  # noqa: RUF012

    def __init__(self, num_pieces: int = 8, width: int = 16):
        self.num_pieces = num_pieces
        self.width = width
        self.offset = 0.0  # not the same training, whatever its author says
        self.smoothing = 0.0

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(self.width, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(256, self.width, generator=generator)
        return torch.utils.data.TensorDataset(inputs, torch.randn(256, 4, generator=generator))

    def loss(self, model, batch):
        inputs, targets = batch
        return in_pieces(model, inputs, (1 - self.smoothing) * targets + self.offset, self.num_pieces)


class Shifted(Pieces):
    """Its samples depend on what it calls the same training."""

    knobs = {"shift": (0.0, 1.0)}  # noqa: RUF012
    recipe_knobs = {}  # noqa: RUF012
    shift = 0.0

    def dataset(self):
        inputs, targets = super().dataset().tensors
        return torch.utils.data.TensorDataset(inputs + self.shift, targets)


class Widening(Pieces):
    """Its model has other parameters under its knob."""

    knobs = {"width": (16, 32)}  # noqa: RUF012
    recipe_knobs = {}  # noqa: RUF012
