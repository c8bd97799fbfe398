"""Steps whose compute sleeps, as a device's would leave the processor free: real gradients, and time that does not
depend on the number of cores or on who else uses them.
"""

import time

import torch
from torch import nn

import steptune


class _Sleep(torch.autograd.Function):
    """Passes values and gradients on, after a while."""

    @staticmethod
    def forward(ctx, values, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class _Block(nn.Module):
    def __init__(self, features, forward_s, backward_s):
        super().__init__()
        self.linear = nn.Linear(features, features, bias=False)
        self.times_s = forward_s, backward_s

    def forward(self, values):
        return torch.tanh(self.linear(_Sleep.apply(values, *self.times_s)))


class _Model(nn.Module):
    def __init__(self, blocks, features, forward_s, backward_s):
        super().__init__()
        self.blocks = nn.ModuleList(_Block(features, forward_s, backward_s) for _ in range(blocks))

    def forward(self, values):
        for block in self.blocks:
            values = block(values)
        return values


class Sleeping(steptune.Workload):
    """Equal blocks of one matrix; each sleeps in the forward pass and twice as long in the backward pass."""

    def __init__(self, batch=4, blocks=8, features=512, block_ms=3.0, length=4096):
        self.global_batch, self.length = batch, length
        self.blocks_of, self.features, self.block_s = blocks, features, block_ms / 1e3

    def model(self):
        return _Model(self.blocks_of, self.features, self.block_s, 2 * self.block_s)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(self.length, self.features, generator=generator)
        return torch.utils.data.TensorDataset(values, values.roll(1, 1))

    def optimizer(self, named_parameters):
        return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=1e-3)

    def loss(self, model, batch):
        values, wanted = batch
        return nn.functional.mse_loss(model(values), wanted)
