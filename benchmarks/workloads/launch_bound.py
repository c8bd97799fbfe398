"""Small batches of deep networks: the device is done with an operator before the host has launched the next one."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import steptune


class LaunchBound(steptune.Workload):
    """ResNet-50 with few images at a time, which lie in memory as bytes, so that little waits for data."""

    def __init__(self, batch=6, images=256, image_size=224, hidden_sizes="256,512,1024,2048", depths="3,4,6,3"):
        self.global_batch = batch
        self.images, self.image_size = images, image_size
        self.hidden_sizes = [int(size) for size in hidden_sizes.split(",")]
        self.depths = [int(depth) for depth in depths.split(",")]

    def model(self):
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(hidden_sizes=self.hidden_sizes, depths=self.depths, num_labels=1000)
        return ResNetForImageClassification(config)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (self.images, 3, self.image_size, self.image_size), generator=generator)
        images = images.to(torch.uint8)
        return torch.utils.data.TensorDataset(images, torch.randint(1000, (self.images,), generator=generator))

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(pixel_values=images.float() / 127.5 - 1.0).logits, labels)


class ResidualLayer(nn.Module):
    """A linear layer between a normalisation and an activation that are written out, as in many a first version."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.linear = nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = (centred**2).mean(dim=-1, keepdim=True)
        y = self.linear(centred / torch.sqrt(variance + 1e-5) * self.gain + self.shift)
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y**3)))
        return x + self.scale * y


class Rows(steptune.Workload):
    """A deep residual network on few rows of a table: wide layers, each of many short operators."""

    def __init__(self, batch=32, rows=4096, columns=512, width=4096, depth=24):
        self.global_batch = batch
        self.rows, self.columns, self.width, self.depth = rows, columns, width, depth

    def model(self):
        layers = [ResidualLayer(self.width) for _ in range(self.depth)]
        return nn.Sequential(nn.Linear(self.columns, self.width), *layers, nn.Linear(self.width, 2))

    def blocks(self, model):
        return [layer for layer in model if isinstance(layer, ResidualLayer)]

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(self.rows, self.columns, generator=generator)
        return torch.utils.data.TensorDataset(values, (values[:, :8].sum(1) > 0).long())

    def loss(self, model, batch):
        values, labels = batch
        return F.cross_entropy(model(values), labels)

    def optimizer(self, named_parameters):
        return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-4, fused=True)
