"""A small monocular 3-D detector: the head of FCOS3D over five maps, with its targets and losses.

What matters here are the targets, made in every step for every image (see `steptune.kernels.fcos3d`): many small
operators over all pairs of points and boxes, which `fused_kernels` makes one launch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steptune.kernels.fcos3d import Assigner, Points, Scenes, Targets
from steptune.tuner.workloads.adapters.random_data import POOL_SIZE, random_bytes, with_normal_pixels
from steptune.tuner.workloads.arguments import check_multiple
from steptune.tuner.workloads.workload import NamedParameters, Workload
from steptune.tuner.workloads.zoo.detector import NONE, Stages
from steptune.tuner.workloads.zoo.fcos3d import make_points

STRIDES = (8, 16, 32, 64, 128)
BOX_PARTS = 9
DEPTH_WEIGHT, VELOCITY_WEIGHT = 0.2, 0.05
"""Weights of the depth and velocity losses; offset, sizes and yaw have weight 1."""
FOCAL_ALPHA, FOCAL_GAMMA = 0.25, 2.0
SMOOTH_L1_BETA = 1 / 9
DIRECTION_OFFSET = math.pi / 4
PRIOR = 0.01
"""Initial probability of a class."""
_DATASET_LENGTH = 65536


class MonocularHead(nn.Module):
    """Head that predicts at every point: classes, attributes, a box, one of two directions, and centerness."""

    def __init__(self, width: int, depth: int, num_classes: int, num_attributes: int) -> None:
        super().__init__()
        self.backbone = Stages(width, len(STRIDES), depth)
        self.parts = (num_classes, num_attributes, BOX_PARTS, 2, 1)
        heads: list[Any] = [nn.Conv2d(w, sum(self.parts), 1) for w in self.backbone.widths]
        self.heads = nn.ModuleList(heads)
        for head in heads:
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)
            nn.init.constant_(head.bias[:num_classes], -math.log((1 - PRIOR) / PRIOR))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Return the predictions of all levels (B, P, parts), and each level's number of rows and columns."""
        levels = [head(level) for head, level in zip(self.heads, self.backbone(images), strict=True)]
        sizes = [(level.shape[2], level.shape[3]) for level in levels]
        return torch.cat([level.flatten(2) for level in levels], dim=2).transpose(1, 2), sizes


class RandomRoads:
    """Images of random bytes with random 3-D boxes. Sample i is always the same.

    Padded to `most` boxes with the label `NONE`, so that batches are of one shape.
    """

    def __init__(self, length: int, size: tuple[int, int], num_classes: int, num_attributes: int, most: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._length = length
        self._size = torch.tensor(size[::-1]).float()
        self._pool = random_bytes((min(length, POOL_SIZE), 3, *size), generator)
        self._kinds = (num_classes, num_attributes)
        self._most = most

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        most = self._most
        half = (0.02 + 0.3 * torch.rand(most, 2, generator=generator) ** 2) * self._size / 2
        centre = torch.rand(most, 2, generator=generator) * self._size
        depth = 2 + 50 * torch.rand(most, generator=generator)
        sizes = 1 + 3 * torch.rand(most, 3, generator=generator)
        yaw = math.pi * (2 * torch.rand(most, 1, generator=generator) - 1)
        place = (centre / self._size - 0.5) * depth[:, None]
        velocities = torch.randn(most, 2, generator=generator)
        labels, attributes = (torch.randint(kinds, (most,), generator=generator) for kinds in self._kinds)
        labels[int(torch.randint(most + 1, (), generator=generator)) :] = NONE
        return {
            "pixel_values": self._pool[index % len(self._pool)],
            "corners": torch.cat([centre - half, centre + half], dim=1),
            "labels": labels,
            "attributes": attributes,
            "centres": centre,
            "depths": depth,
            "boxes": torch.cat([place, depth[:, None], sizes, yaw, velocities], dim=1),
        }


class Monocular3D(Workload):
    """Training of the head and a small backbone on random scenes.

    Args:
        height: Pixels, a multiple of 128, as `image_width`.
        most_boxes: Maximum number of boxes in an image; the minimum is 0.
    """

    def __init__(
        self,
        batch: int = 4,
        height: int = 896,
        image_width: int = 1536,
        width: int = 64,
        depth: int = 1,
        num_classes: int = 10,
        num_attributes: int = 9,
        most_boxes: int = 40,
        lr: float = 1e-3,
    ) -> None:
        check_multiple("height", height, 128)
        check_multiple("image_width", image_width, 128)
        self.global_batch = batch
        self._size = (height, image_width)
        self._shape = (width, depth)
        self._kinds = (num_classes, num_attributes)
        self._most = most_boxes
        self._lr = lr
        self._assigner = Assigner()

    def model(self) -> nn.Module:
        return MonocularHead(*self._shape, *self._kinds)

    def dataset(self) -> Any:
        return RandomRoads(_DATASET_LENGTH, self._size, *self._kinds, self._most)

    def batch_transform(self, batch: Any) -> Any:
        return with_normal_pixels(batch)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        predictions, sizes = model(batch["pixel_values"])
        points = make_points(sizes, STRIDES, predictions.device)
        names = ("corners", "labels", "attributes", "centres", "depths", "boxes")
        targets = self._assigner(points, Scenes(*(batch[name] for name in names)), *self._kinds)
        return monocular_loss(predictions.float(), points, targets, *self._kinds)

    def optimizer(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=self._lr)


def monocular_loss(
    predictions: torch.Tensor, points: Points, targets: Targets, num_classes: int, num_attributes: int
) -> torch.Tensor:
    """Compute FCOS3D's losses over a batch. The class loss covers all points; the others cover only points that learn a
    box.

    Args:
        predictions: (B, P, parts).
    """
    classes, attributes, box, direction, centerness = predictions.flatten(0, 1).split(
        (num_classes, num_attributes, BOX_PARTS, 2, 1), dim=1
    )
    labels = targets.label.flatten()
    wanted = targets.box.flatten(0, 1)
    learns = labels < num_classes
    count = learns.sum().clamp(min=1)

    def mean(losses: torch.Tensor) -> torch.Tensor:
        return torch.where(learns, losses, 0.0).sum() / count

    closeness = targets.centerness.flatten()
    hot = F.one_hot(labels, num_classes + 1)[:, :num_classes].to(classes.dtype)
    focal = focal_loss(classes, hot).sum() / count
    regression = mean(box_loss(box, wanted, points.stride.repeat(len(targets.label))))
    turned = (torch.remainder(wanted[:, 6] - DIRECTION_OFFSET, 2 * math.pi) >= math.pi).long()
    facing = mean(F.cross_entropy(direction, turned, reduction="none"))
    named = targets.attribute.flatten().clamp(max=num_attributes - 1)
    attribute = mean(F.cross_entropy(attributes, named, reduction="none"))
    central = mean(F.binary_cross_entropy_with_logits(centerness.squeeze(1), closeness, reduction="none"))
    return focal + regression + facing + attribute + central


def focal_loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Compute the elementwise focal loss. Source: Lin et al., "Focal Loss" (2017), arXiv 1708.02002."""
    probability = logits.sigmoid()
    right = probability * wanted + (1 - probability) * (1 - wanted)
    weight = FOCAL_ALPHA * wanted + (1 - FOCAL_ALPHA) * (1 - wanted)
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return weight * (1 - right) ** FOCAL_GAMMA * entropy


def box_loss(predicted: torch.Tensor, wanted: torch.Tensor, stride: torch.Tensor) -> torch.Tensor:
    """Compute the box loss of every point. Offsets are in units of the stride. Yaws are compared by the sine of their
    difference, which cannot tell opposite directions apart; another output predicts the direction.
    """
    offset = wanted[:, :2] / stride[:, None]
    yaw_difference = torch.sin(predicted[:, 6:7] - wanted[:, 6:7])
    difference = torch.cat(
        [
            predicted[:, :2] - offset,
            predicted[:, 2:6] - wanted[:, 2:6],
            yaw_difference,
            predicted[:, 7:] - wanted[:, 7:],
        ],
        dim=1,
    )
    each = F.smooth_l1_loss(difference, torch.zeros_like(difference), beta=SMOOTH_L1_BETA, reduction="none")
    # No tensor of weights: made from the host's numbers it would wait for the device, and no CUDA graph could hold it.
    return each[:, :2].sum(1) + DEPTH_WEIGHT * each[:, 2] + each[:, 3:7].sum(1) + VELOCITY_WEIGHT * each[:, 7:].sum(1)
