"""A small dense detector with YOLOv7's anchors and loss: SimOTA assigns anchors to boxes in every step.

A stem and three stages of convolutions give maps of 8, 16 and 32 pixels a cell; one 1 x 1 convolution a
map predicts. What matters here is the assignment: many small operators on tensors whose sizes depend on
the data (see `simota`), which `fused_kernels` replaces by few operators on tensors of a fixed size (see
`padded_simota`).
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steptune.kernels.simota import Assigner
from steptune.tuner.workloads.adapters.random_data import POOL_SIZE, random_bytes, with_normal_pixels
from steptune.tuner.workloads.arguments import check_multiple
from steptune.tuner.workloads.workload import NamedParameters, Workload
from steptune.tuner.workloads.zoo.padded_simota import Candidates, filled, find_all
from steptune.tuner.workloads.zoo.simota import Boxes, Places, assign, complete_overlap, corners, decode

STRIDES = (8, 16, 32)
ANCHORS = (
    ((12, 16), (19, 36), (40, 28)),
    ((36, 75), (76, 55), (72, 146)),
    ((142, 110), (192, 243), (459, 401)),
)
"""Widths and heights of YOLOv7's anchors, in pixels of images of 640 pixels."""
BALANCE = (4.0, 1.0, 0.4)
"""Weights of the objectness loss, by level."""
BOX_WEIGHT, OBJECTNESS_WEIGHT, CLASS_WEIGHT = 0.05, 0.7, 0.3
NONE = -1
"""Label of the padding entries in an image's list of boxes."""
_DATASET_LENGTH = 65536


class ConvBlock(nn.Module):
    """Block of convolution, batch normalisation and SiLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x)))


class Stages(nn.Module):
    """Backbone that computes feature maps of images (B, 3, H, W) at strides 8, 16, 32 and so on. The second and the
    third map each have twice as many channels as the one before.

    Args:
        width: Channels of the map of stride 8.
        num_maps: Number of maps.
        depth: Number of further convolutions at each stride.
    """

    def __init__(self, width: int, num_maps: int, depth: int) -> None:
        super().__init__()
        self.widths = tuple(width * 2 ** min(2, number) for number in range(num_maps))
        self.stem = nn.Sequential(ConvBlock(3, width // 2, 2), ConvBlock(width // 2, width // 2, 2))
        ends = (width // 2, *self.widths)
        self.stages = nn.ModuleList(
            nn.Sequential(
                ConvBlock(ends[n], ends[n + 1], 2), *(ConvBlock(ends[n + 1], ends[n + 1], 1) for _ in range(depth))
            )
            for n in range(num_maps)
        )

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        x = self.stem(images)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


class DenseDetector(nn.Module):
    """Detector whose forward pass returns predictions of each level, (B, A, H, W, 5 + K)."""

    def __init__(self, width: int, depth: int, num_classes: int, size: int) -> None:
        super().__init__()
        self.backbone = Stages(width, len(STRIDES), depth)
        num_anchors = len(ANCHORS[0])
        heads: list[Any] = [nn.Conv2d(w, num_anchors * (5 + num_classes), 1) for w in self.backbone.widths]
        self.heads = nn.ModuleList(heads)
        for head, stride in zip(heads, STRIDES, strict=True):
            with torch.no_grad():  # as many objects an image as usual, so that training begins calmly
                bias = head.bias.view(num_anchors, -1)
                bias[:, 4] += math.log(8 / (size / stride) ** 2)
                bias[:, 5:] += math.log(0.6 / max(1.0, num_classes - 0.99))

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for head, level in zip(self.heads, self.backbone(images), strict=True):
            batch, _, height, width = level.shape
            outputs.append(head(level).view(batch, len(ANCHORS[0]), -1, height, width).permute(0, 1, 3, 4, 2))
        return outputs


class RandomScenes:
    """Images of random bytes with random boxes. Sample i is always the same.

    A sample has places for `most` boxes, with the label `NONE` where there is none, so that batches are of
    one shape.
    """

    def __init__(self, length: int, size: int, num_classes: int, most: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._length = length
        self._pool = random_bytes((min(length, POOL_SIZE), 3, size, size), generator)
        self._num_classes = num_classes
        self._most = most

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        size = 0.05 + 0.45 * torch.rand(self._most, 2, generator=generator) ** 2
        centre = size / 2 + (1 - size) * torch.rand(self._most, 2, generator=generator)
        labels = torch.randint(self._num_classes, (self._most,), generator=generator)
        count = int(torch.randint(self._most + 1, (), generator=generator))
        labels[count:] = NONE
        return {
            "pixel_values": self._pool[index % len(self._pool)],
            "boxes": torch.cat([centre, size], dim=1),
            "labels": labels,
        }


class Detector(Workload):
    """Training of a dense detector on random scenes.

    Args:
        image_size: Pixels a side, a multiple of 32.
        most_boxes: Maximum number of boxes in an image; the minimum is 0.
    """

    def __init__(
        self,
        batch: int = 16,
        image_size: int = 640,
        width: int = 64,
        depth: int = 2,
        num_classes: int = 80,
        most_boxes: int = 20,
        lr: float = 1e-3,
    ) -> None:
        check_multiple("image_size", image_size, 32)
        self.global_batch = batch
        self._size = image_size
        self._shape = (width, depth, num_classes)
        self._most = most_boxes
        self._lr = lr
        self._assigner = Assigner()

    def model(self) -> nn.Module:
        return DenseDetector(*self._shape, self._size)

    def dataset(self) -> Any:
        return RandomScenes(_DATASET_LENGTH, self._size, self._shape[2], self._most)

    def batch_transform(self, batch: Any) -> Any:
        return with_normal_pixels(batch)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        predictions = [p.float() for p in model(batch["pixel_values"])]
        if self._assigner.in_one_pass:
            return padded_loss(predictions, batch["boxes"], batch["labels"], self._size, self._assigner)
        return detection_loss(predictions, boxes_of(batch["boxes"], batch["labels"]), self._size)

    def optimizer(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=self._lr)


def boxes_of(xywh: torch.Tensor, labels: torch.Tensor) -> Boxes:
    """Return the boxes of a batch from padded tensors: boxes (B, most, 4) and labels (B, most)."""
    image, place = (labels != NONE).nonzero(as_tuple=True)
    return Boxes(image, labels[image, place], xywh[image, place])


def detection_loss(predictions: list[torch.Tensor], boxes: Boxes, size: int) -> torch.Tensor:
    """Compute YOLOv7's loss as a mean over the images: complete IoU of boxes, objectness with the IoU as target,
    classes.
    """
    anchors = boxes.xywh.new_tensor(ANCHORS) * (size / 640)
    matches = assign(predictions, boxes, anchors, STRIDES, num_images=len(predictions[0]))
    total = boxes.xywh.new_zeros(())
    for level, (raw, found, balance) in enumerate(zip(predictions, matches, BALANCE, strict=True)):
        at = found.places
        objectness = torch.zeros_like(raw[..., 4])
        if len(found.box):
            mine = raw[at.image, at.anchor, at.row, at.column]
            scale = raw.new_tensor([raw.shape[3], raw.shape[2]]).repeat(2)
            iou = complete_overlap(decode(mine, at, anchors[level] / STRIDES[level]), boxes.xywh[found.box] * scale)
            objectness = with_largest(objectness, at, iou.detach().clamp(min=0))
            wanted = F.one_hot(boxes.label[found.box], raw.shape[-1] - 5).to(raw.dtype)
            total = total + BOX_WEIGHT * (1 - iou).mean()
            total = total + CLASS_WEIGHT * F.binary_cross_entropy_with_logits(mine[:, 5:], wanted)
        total = total + OBJECTNESS_WEIGHT * balance * F.binary_cross_entropy_with_logits(raw[..., 4], objectness)
    return total


def with_largest(objectness: torch.Tensor, at: Places, overlap: torch.Tensor) -> torch.Tensor:
    """Return objectness targets (B, A, H, W): at each given anchor, its overlap with its box, or the largest overlap if
    several boxes share the anchor.
    """
    _, anchors, height, width = objectness.shape
    index = ((at.image * anchors + at.anchor) * height + at.row) * width + at.column
    return objectness.flatten().scatter_reduce(0, index, overlap, "amax").view_as(objectness)


def padded_loss(
    predictions: list[torch.Tensor], xywh: torch.Tensor, labels: torch.Tensor, size: int, assigner: Assigner
) -> torch.Tensor:
    """Compute YOLOv7's loss on tensors of a fixed size: every anchor that could learn a box is a candidate, and most
    candidates are masked out.

    Args:
        xywh: Padded boxes (B, G, 4).
        labels: (B, G).
    """
    sizes = filled(xywh, list(chain.from_iterable(chain.from_iterable(ANCHORS)))).view(len(ANCHORS), -1, 2)
    anchors = [own * (size / 640 / stride) for own, stride in zip(sizes, STRIDES, strict=True)]
    levels = [find_all(raw, xywh, labels, own) for raw, own in zip(predictions, anchors, strict=True)]
    total = xywh.new_zeros(())
    for raw, level, box, balance in zip(
        predictions, levels, _assigned(levels, xywh, labels, assigner), BALANCE, strict=True
    ):
        learns = box >= 0
        count = learns.sum().clamp(min=1)
        index = box.clamp(min=0)
        scale = filled(raw, (raw.shape[3], raw.shape[2])).repeat(2)
        wanted = xywh.take_along_dim(index[..., None], 1) * scale
        iou = complete_overlap(level.boxes.flatten(0, 1), wanted.flatten(0, 1)).view_as(index)
        overlap = torch.where(learns, iou.detach(), 0.0).clamp(min=0)
        objectness = torch.zeros_like(raw[..., 4]).flatten(1).scatter_reduce(1, level.place, overlap, "amax")
        hot = F.one_hot(labels.take_along_dim(index, 1).clamp(min=0), raw.shape[-1] - 5).to(raw.dtype)
        classes = F.binary_cross_entropy_with_logits(level.raw[..., 5:], hot, reduction="none").mean(2)
        total = total + BOX_WEIGHT * torch.where(learns, 1 - iou, 0.0).sum() / count
        total = total + CLASS_WEIGHT * torch.where(learns, classes, 0.0).sum() / count
        wrong = F.binary_cross_entropy_with_logits(raw[..., 4].flatten(1), objectness)
        total = total + OBJECTNESS_WEIGHT * balance * wrong
    return total


def _assigned(
    levels: list[Candidates], xywh: torch.Tensor, labels: torch.Tensor, assigner: Assigner
) -> list[torch.Tensor]:
    """Return, for every candidate on every level, the index of the box that it learns, or -1."""
    raw = torch.cat([level.raw.detach() for level in levels], 1)
    # In pixels of the first level's cells: overlaps do not depend on the unit.
    boxes = torch.cat([level.boxes.detach() * stride for level, stride in zip(levels, STRIDES, strict=True)], 1)
    height, width = levels[0].cells
    wanted = xywh * (filled(xywh, (width, height)).repeat(2) * STRIDES[0])
    valid = torch.cat([level.counts for level in levels], 1)
    found = assigner(corners(boxes), raw[..., 4], raw[..., 5:], corners(wanted), labels, valid_bm=valid)
    return list(found.split([level.place.shape[1] for level in levels], 1))
