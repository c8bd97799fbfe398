"""A small ResNet over a folder of JPEG files, with augmentation in the loader: truly input-bound.

The files are cut from the two sample photographs that come with scikit-learn. Today's settings load in
the main process (num_workers=0), as a first version of a training script often does.

    steptune tune examples/photo_resnet.py:PhotoResNet --budget 8m
"""

import io
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images
from torch import nn

import steptune

NUM_FILES = 512
CROP = 400
SIZE = 64


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
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

    def __init__(self, width: int = 16, num_classes: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=4, padding=3)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, 1), ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class Photos(torch.utils.data.Dataset):
    """JPEG files. `load` decodes, which is deterministic; `augment` crops, flips and changes colours."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, index):
        with Image.open(self.paths[index]) as image:
            return np.asarray(image.convert("RGB")), int(self.paths[index].name.startswith("flower"))

    def augment(self, sample):
        pixels, label = sample
        scale = 0.5 + 0.5 * torch.rand(()).item()
        side = int(CROP * scale)
        left, top = (int(torch.randint(CROP - side + 1, ()).item()) for _ in range(2))
        image = Image.fromarray(pixels[top : top + side, left : left + side]).resize((SIZE, SIZE), Image.BICUBIC)
        if torch.rand(()) < 0.5:
            image = ImageOps.mirror(image)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        return (tensor - 0.5) * (0.8 + 0.4 * torch.rand(())), label

    def __getitem__(self, index):
        return self.augment(self.load(index))


class PhotoResNet(steptune.Workload):
    """Which of the two photographs was a piece cut from?"""

    global_batch = 32

    def prepare(self, directory):
        folder = directory / "photos"
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(0)
        for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
            height, width, _ = photo.shape
            for number in range(NUM_FILES // 2):
                top, left = generator.integers(height - CROP), generator.integers(width - CROP)
                buffer = io.BytesIO()
                Image.fromarray(photo[top : top + CROP, left : left + CROP]).save(buffer, "JPEG", quality=92)
                (folder / f"{name}_{number:04d}.jpg").write_bytes(buffer.getvalue())

    def model(self):
        return ResNet()

    def dataset(self):
        return Photos(self.directory / "photos")

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def optimizer(self, named_parameters):
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.05, momentum=0.9, weight_decay=1e-4)
