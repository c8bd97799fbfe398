"""A package that registers kernels of its own: one that is right, one that is not, and the layers that they compute."""

import time

import torch

from steptune import Workload
from steptune.kernels import Case, Kernel, Pattern

WAIT_S = 0.004
"""The layers wait so long, as for ten launches."""


class Affine(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.bias = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        time.sleep(WAIT_S)
        return x * self.weight + self.bias


class Bent(Affine):
    def forward(self, x):
        return torch.tanh(super().forward(x))


def affine_reference(x, weight, bias):
    return x * weight + bias


@torch.library.custom_op("other_package::affine", mutates_args=())
def affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(bias, x, weight)


@affine.register_fake
def _(x, weight, bias):
    return torch.empty_like(x)


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def differentiate(ctx, gradient):
    x, weight = ctx.saved_tensors
    rows = tuple(range(x.ndim - 1))
    return gradient * weight, (gradient * x).sum(rows), gradient.sum(rows)


affine.register_autograd(differentiate, setup_context=keep)


class FastAffine(Affine):
    def forward(self, x):
        return affine(x, self.weight, self.bias)


class WrongBent(Bent):
    """Forgets the tanh."""

    def forward(self, x):
        return affine(x, self.weight, self.bias)


def replaces(cls, by):
    def refusal(module):
        if type(module) is not cls:
            return None
        return "needs at least 2 columns" if module.weight.numel() < 2 else ""

    def replace(module):
        module.__class__ = by

    return Pattern(
        what=f"{cls.__name__} layers", refusal=refusal, replace=replace, operators=("other_package::affine",)
    )


def kernel(name, cls, by):
    return Kernel(
        name=name,
        summary="x times weight plus bias in one pass",
        function=affine,
        reference=affine_reference,
        cases=(Case(label="plain", shapes={"x": (3, 5), "weight": (5,), "bias": (5,)}),),
        tolerances={torch.float32: 1e-6},
        pattern=replaces(cls, by),
    )


RIGHT = kernel("right_affine", Affine, FastAffine)
WRONG = kernel("wrong_affine", Bent, WrongBent)


class Layers(Workload):
    global_batch = 8

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(16, 8), Affine(8), Bent(8), torch.nn.Linear(8, 4))

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(256, 16, generator=generator)
        return torch.utils.data.TensorDataset(inputs, torch.randn(256, 4, generator=generator))

    def loss(self, model, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)
