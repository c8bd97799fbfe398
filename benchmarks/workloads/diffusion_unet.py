"""A diffusion model's UNet, trained as people train it already: bf16 and compiled."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import steptune


class Residual(nn.Module):
    """Two convolutions, shifted and scaled by the time step."""

    def __init__(self, inputs, outputs, time, dropout):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, 2 * outputs), nn.Dropout(dropout)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)
        nn.init.normal_(self.conv2.weight, std=1e-3)

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        y = self.norm2(y) * (1 + scale) + shift
        return self.skip(x) + self.conv2(self.dropout(F.silu(y)))


class Attention(nn.Module):
    """Every place of an image looks at every other."""

    def __init__(self, channels, head):
        super().__init__()
        self.heads = channels // head
        self.norm = nn.GroupNorm(32, channels)
        self.inputs, self.out = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)
        nn.init.normal_(self.out.weight, std=1e-3)

    def forward(self, x):
        rows, channels, height, width = x.shape
        parts = self.inputs(self.norm(x).flatten(2)).view(rows, 3, self.heads, -1, height * width)
        q, k, v = parts.transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(rows, channels, -1)
        return x + self.out(y).view(rows, channels, height, width)


class Level(nn.Module):
    """A residual block, with attention behind it at the coarser resolutions."""

    def __init__(self, inputs, outputs, time, dropout, head):
        super().__init__()
        self.residual = Residual(inputs, outputs, time, dropout)
        self.attention = Attention(outputs, head) if head else nn.Identity()

    def forward(self, x, time):
        return self.attention(self.residual(x, time))


class UNet(nn.Module):
    """Down to the coarsest resolution and up again, each level joined to its counterpart."""

    def __init__(self, channels, multipliers, attended, depth, dropout, head):
        super().__init__()
        time = 4 * channels
        self.channels = channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        widths, skips = [channels * m for m in multipliers], [channels]
        width = channels
        for number, outputs in enumerate(widths):
            for _ in range(depth):
                self.down.append(Level(width, outputs, time, dropout, head if number in attended else 0))
                width = outputs
                skips.append(width)
            if number < len(widths) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList([Level(width, width, time, dropout, head), Level(width, width, time, dropout, 0)])
        for number, outputs in reversed(list(enumerate(widths))):
            for _ in range(depth + 1):
                inputs = width + skips.pop()
                self.up.append(Level(inputs, outputs, time, dropout, head if number in attended else 0))
                width = outputs
            if number:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(width, width, 3, padding=1)))
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, steps):
        time = self.time(waves(steps, self.channels))
        x = self.first(x)
        skips = [x]
        for part in self.down:
            x = part(x, time) if isinstance(part, Level) else part(x)
            skips.append(x)
        for part in self.middle:
            x = part(x, time)
        for part in self.up:
            x = part(torch.cat((x, skips.pop()), dim=1), time) if isinstance(part, Level) else part(x)
        return self.last(F.silu(self.norm(x)))


def waves(steps, channels):
    """Sines and cosines of a time step."""
    half = channels // 2
    rates = torch.exp(-math.log(10_000) / half * torch.arange(half, device=steps.device))
    angles = steps[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class DiffusionUNet(steptune.Workload):
    """Sizes of a DDPM for images of 128 pixels (102 million parameters), on random images, which lie in memory."""

    current = {  # noqa: RUF012 (a workload's own attribute)
        "precision": {"level": "O1", "dtype": "bfloat16"},
        "compile": {"mode": "default"},
    }

    def __init__(
        self,
        batch=32,
        image_size=128,
        channels=192,
        multipliers="1,2,4",
        attended="2",
        depth=1,
        dropout=0.1,
        head=64,
        images=512,
        num_steps=1000,
        plain=False,
    ):
        if plain:
            self.current = {}
        self.global_batch = batch
        self.image_size, self.images, self.num_steps = image_size, images, num_steps
        self.multipliers = [int(m) for m in str(multipliers).split(",")]
        self.attended = [int(level) for level in str(attended).split(",")]
        self.channels, self.depth, self.dropout, self.head = channels, depth, dropout, head

    def model(self):
        return UNet(self.channels, self.multipliers, self.attended, self.depth, self.dropout, self.head)

    def blocks(self, model):
        return [part for part in (*model.down, *model.middle, *model.up) if isinstance(part, Level)]

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        size = (self.images, 3, self.image_size, self.image_size)
        return torch.utils.data.TensorDataset(torch.randn(size, generator=generator))

    def loss(self, model, batch):
        """The error in guessing the noise that was added to the images, at random steps of the diffusion."""
        (images,) = batch
        steps = torch.randint(self.num_steps, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        kept = torch.cos(0.5 * math.pi * (steps + 1) / (self.num_steps + 1))[:, None, None, None]
        noisy = kept * images + (1 - kept**2).sqrt() * noise
        return F.mse_loss(model(noisy, steps).float(), noise)

    def optimizer(self, named_parameters):
        return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-4)
