"""VGG-16 (configuration D): stacks of 3 x 3 convolutions, and three linear layers that hold most of the parameters.

Its gradients are large beside its arithmetic, and the largest are the first to be ready in the backward pass: a slow
network between ranks shows in the step time.

Source: Simonyan and Zisserman, "Very Deep Convolutional Networks" (2014), arXiv 1409.1556, table 1 and section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steptune.tuner.workloads.adapters.random_data import RandomImages, with_normal_pixels
from steptune.tuner.workloads.arguments import check_multiple
from steptune.tuner.workloads.workload import NamedParameters, Workload

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions in each stage; a pooling after each stage halves the image."""
_DATASET_LENGTH = 65536


class Vgg(nn.Module):
    """VGG whose forward pass maps images (batch, 3, size, size) to logits (batch, num_labels)."""

    def __init__(self, size: int, divisor: int, hidden: int, num_labels: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in STAGES:
            for width in stage:
                layers += [nn.Conv2d(channels, width // divisor, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width // divisor
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * (size // 2 ** len(STAGES)) ** 2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_labels),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class VggClassifier(Workload):
    """Training of a VGG image classifier.

    Args:
        batch: Images per step.
        image_size: Pixels a side, a multiple of 32.
        divisor: Divisor of every convolution's channels, for smaller models.
        hidden: Width of the linear layers.
    """

    initialises_on_device = True

    def __init__(
        self,
        batch: int = 64,
        image_size: int = 224,
        divisor: int = 1,
        hidden: int = 4096,
        num_labels: int = 1000,
        dropout: float = 0.5,
        lr: float = 1e-4,
    ) -> None:
        check_multiple("image_size", image_size, 2 ** len(STAGES))
        self.global_batch = batch
        self._size = image_size
        self._num_labels = num_labels
        self._arguments = (image_size, divisor, hidden, num_labels, dropout)
        self._lr = lr

    def model(self) -> nn.Module:
        return Vgg(*self._arguments)

    def dataset(self) -> Any:
        return RandomImages(_DATASET_LENGTH, (3, self._size, self._size), self._num_labels)

    def batch_transform(self, batch: Any) -> Any:
        return with_normal_pixels(batch)

    def blocks(self, model: Any) -> Any:
        """Return the convolutions as the repeated blocks, although their sizes differ."""
        return [module for module in model.features if isinstance(module, nn.Conv2d)]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])

    def optimizer(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=self._lr)

    def num_units(self, batch: Any) -> int:
        return int(batch["pixel_values"].shape[0])
