"""A small ResNet on real JPEG files, decoded and augmented in the main process: bound by its input.

The files are made once, in the study's folder, from seeded smooth random images; two classes differ in how smooth
they are. Today's settings are those of a first version of a training script: no workers, pageable memory.
"""

import io

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import nn

import steptune

QUALITY = 90


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem and three stages of residual blocks."""

    def __init__(self, width, num_classes=2):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=4, padding=3)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, 1), ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def smooth_image(generator, side, grain):
    """Random colours on a coarse grid, enlarged: compresses as a photograph does, not as noise."""
    grid = generator.integers(0, 256, (side // grain, side // grain, 3), dtype=np.uint8)
    return Image.fromarray(grid).resize((side, side), Image.BICUBIC)


class JpegFiles(torch.utils.data.Dataset):
    """`load` reads and decodes a file, which is deterministic; `augment` crops, scales, flips."""

    def __init__(self, folder, size):
        self.paths = sorted(folder.glob("*.jpg"))
        self.size = size

    def __len__(self):
        return len(self.paths)

    def load(self, index):
        with Image.open(self.paths[index]) as image:
            return np.asarray(image.convert("RGB")), int(self.paths[index].name.startswith("fine"))

    def augment(self, sample):
        pixels, label = sample
        full = pixels.shape[0]
        side = int(full * (0.5 + 0.5 * torch.rand(()).item()))
        left, top = (int(torch.randint(full - side + 1, ()).item()) for _ in range(2))
        image = Image.fromarray(pixels[top : top + side, left : left + side]).resize((self.size,) * 2, Image.BICUBIC)
        if torch.rand(()) < 0.5:
            image = ImageOps.mirror(image)
        return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() - 127.5) / 73.9, label

    def __getitem__(self, index):
        return self.augment(self.load(index))


class JpegResNet(steptune.Workload):
    """Fine or coarse?"""

    def __init__(self, files=1024, side=512, size=224, width=32, batch=64):
        self.global_batch = batch
        self.files, self.side, self.size, self.width = files, side, size, width

    def prepare(self, directory):
        folder = directory / "jpeg"
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(0)
        for number in range(self.files):
            kind, grain = (("coarse", 32), ("fine", 8))[number % 2]
            buffer = io.BytesIO()
            smooth_image(generator, self.side, grain).save(buffer, "JPEG", quality=QUALITY)
            (folder / f"{kind}_{number:05d}.jpg").write_bytes(buffer.getvalue())

    def model(self):
        return ResNet(self.width)

    def dataset(self):
        return JpegFiles(self.directory / "jpeg", self.size)

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def optimizer(self, named_parameters):
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.05, momentum=0.9)


class ShortEpochs(steptune.Workload):
    """A few small samples: an epoch takes a moment, and its workers start anew with each."""

    current = {"data_loading": {"num_workers": 4}}  # noqa: RUF012

    def __init__(self, samples=512, features=4096, width=512, batch=32):
        self.global_batch = batch
        self.samples, self.features, self.width = samples, features, width

    def model(self):
        return nn.Sequential(nn.Linear(self.features, self.width), nn.ReLU(), nn.Linear(self.width, 2))

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        samples = torch.randn(self.samples, self.features, generator=generator)
        return torch.utils.data.TensorDataset(samples, (samples[:, :8].sum(1) > 0).long())

    def loss(self, model, batch):
        samples, labels = batch
        return F.cross_entropy(model(samples), labels)

    def optimizer(self, named_parameters):
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.01)
