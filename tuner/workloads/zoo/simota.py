"""SimOTA as in YOLOv7's training (`ComputeLossOTA`): the assignment of a dense detector's anchors to boxes.

For every image: anchors near each box are candidates; a cost of class and overlap is computed for all
pairs; each box takes its cheapest candidates, as many as the sum of its best overlaps; a candidate that
several boxes took goes to the box to which it costs least, of all boxes of the image.

This is the plain form: a loop over the images, and within it over the boxes. It differs from YOLOv7's
code in three things, on purpose: boxes are scaled by width and height (there by the height twice, which
is wrong for images that are not square); all of it is computed in FP32 (there scores stay 16-bit under
autocast, and a probability that rounds to 1 gives NaN); images without boxes need no special case.

Source: WongKinYiu/yolov7, utils/loss.py; Ge et al., "OTA" (2021), arXiv 2103.14259, and "YOLOX" (2021),
arXiv 2107.08430.

Shapes: N boxes of a batch, A anchors of a cell, M candidates and G boxes of an image, K classes.
Predictions of a level are (B, A, H, W, 5 + K): x, y, w, h, objectness, classes, before the sigmoid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ANCHOR_RATIO = 4.0
"""Maximum ratio, in width and in height, between a box and an anchor shape that fits it."""
NEIGHBOUR = 0.5
"""Maximum distance, in cells, between a box's centre and the edge of a neighbouring cell that is a candidate too."""
TOP_OVERLAPS = 10
OVERLAP_WEIGHT = 3.0
_EPSILON = 1e-8
_LEAST_LOGARITHM = -100.0
"""Lower limit for logarithms in binary cross-entropy, as in torch."""


@dataclass(frozen=True)
class Boxes:
    """Boxes of a batch.

    Attributes:
        image: (N), index of each box's image.
        label: (N), class of each box.
        xywh: (N, 4), centre and size as shares of the image.
    """

    image: torch.Tensor
    label: torch.Tensor
    xywh: torch.Tensor


@dataclass(frozen=True)
class Places:
    """Positions of anchors on one feature-map level: index of the image, index of the anchor, row and column of the
    cell.
    """

    image: torch.Tensor
    anchor: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    def take(self, which: torch.Tensor) -> Places:
        return Places(self.image[which], self.anchor[which], self.row[which], self.column[which])


@dataclass(frozen=True)
class Matches:
    """Anchors of one feature-map level that learn a box, with the index of that box in the batch."""

    places: Places
    box: torch.Tensor


def find_candidates(boxes: Boxes, anchors: torch.Tensor, height: int, width: int) -> Places:
    """Return the candidate anchors of one feature-map level: each anchor shape that fits a box, in up to three cells
    around the box's centre.

    An anchor near two boxes is there twice.

    Args:
        anchors: (A, 2), widths and heights in cells.
        height: Number of rows of cells of the level; `width` is the number of columns.
    """
    scale = boxes.xywh.new_tensor([width, height])
    centre, size = boxes.xywh[:, :2] * scale, boxes.xywh[:, 2:] * scale
    ratio = size[None] / anchors[:, None]
    anchor, box = (torch.maximum(ratio, 1 / ratio).amax(dim=2) < ANCHOR_RATIO).nonzero(as_tuple=True)
    centre = centre[box]
    left, top = ((centre % 1 < NEIGHBOUR) & (centre > 1)).unbind(dim=1)
    right, bottom = (((scale - centre) % 1 < NEIGHBOUR) & (scale - centre > 1)).unbind(dim=1)
    steps = centre.new_tensor([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1]]) * NEIGHBOUR
    step, which = torch.stack([torch.ones_like(left), left, top, right, bottom]).nonzero(as_tuple=True)
    column, row = (centre[which] - steps[step]).long().unbind(dim=1)
    return Places(boxes.image[box[which]], anchor[which], row.clamp(0, height - 1), column.clamp(0, width - 1))


def decode(raw: torch.Tensor, places: Places, anchors: torch.Tensor) -> torch.Tensor:
    """Return the predicted boxes (M, 4) as centre and size in cells.

    Args:
        raw: (M, 4 or more), before the sigmoid.
    """
    cell = torch.stack([places.column, places.row], dim=1)
    centre = raw[:, :2].sigmoid() * 2 - 0.5 + cell
    return torch.cat([centre, (raw[:, 2:4].sigmoid() * 2) ** 2 * anchors[places.anchor]], dim=1)


def corners(xywh: torch.Tensor) -> torch.Tensor:
    """Convert boxes to corners (..., 4): left, top, right, bottom."""
    half = xywh[..., 2:] / 2
    return torch.cat([xywh[..., :2] - half, xywh[..., :2] + half], dim=-1)


def overlaps(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of all pairs of boxes, shape (G, M). The boxes are given as corners, of shapes
    (G, 4) and (M, 4).
    """
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(dim=2)
    areas = [(box[:, 2:] - box[:, :2]).prod(dim=1) for box in (first, second)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)


def class_costs(labels: torch.Tensor, objectness: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Return the binary cross-entropy of p = sqrt(class probability * objectness), summed over the classes. Its shape
    is (G, M), for all pairs of a box and a candidate.

    The costs of all classes as wrong ones are summed and corrected for the right one, so that no (G, M, K) tensor is
    needed.

    Args:
        labels: (G).
        objectness: (M), before the sigmoid.
        classes: (M, K), before the sigmoid.
    """
    probability = (classes.sigmoid() * objectness.sigmoid()[:, None]).sqrt()
    right = -probability.log().clamp(min=_LEAST_LOGARITHM)
    wrong = -torch.log1p(-probability).clamp(min=_LEAST_LOGARITHM)
    return (wrong.sum(dim=1)[:, None] - wrong[:, labels] + right[:, labels]).t()


def match(cost: torch.Tensor, overlap: torch.Tensor) -> torch.Tensor:
    """Return, for every candidate of one image, the index of the box that it learns, or -1.

    Args:
        cost: (G, M); `overlap` has the same shape.
    """
    num_boxes, num_candidates = cost.shape
    taken = torch.zeros_like(cost, dtype=torch.bool)
    best = overlap.topk(min(TOP_OVERLAPS, num_candidates), dim=1).values
    counts = best.sum(dim=1).int().clamp(min=1)
    for box in range(num_boxes):
        _, cheapest = cost[box].topk(int(counts[box]), largest=False)
        taken[box, cheapest] = True
    chosen = torch.where(taken.sum(dim=0) > 1, cost.argmin(dim=0), taken.int().argmax(dim=0))
    return torch.where(taken.any(dim=0), chosen, -1)


@torch.no_grad()
def assign(
    predictions: Sequence[torch.Tensor], boxes: Boxes, anchors: torch.Tensor, strides: Sequence[int], num_images: int
) -> list[Matches]:
    """Assign anchors to the boxes that they learn.

    Args:
        predictions: Predictions of each level.
        anchors: (levels, A, 2), widths and heights in pixels.

    Returns:
        Matches of each level, image by image.
    """
    levels = [p.float() for p in predictions]
    scaled = [anchors[number] / stride for number, stride in enumerate(strides)]
    candidates = [find_candidates(boxes, a, p.shape[2], p.shape[3]) for p, a in zip(levels, scaled, strict=True)]
    found: list[list[Matches]] = [[] for _ in levels]
    for image in range(num_images):
        here = [c.take((c.image == image).nonzero().squeeze(1)) for c in candidates]
        numbers = (boxes.image == image).nonzero().squeeze(1)
        counts = [len(places.image) for places in here]
        if not sum(counts):
            continue
        raw = [p[c.image, c.anchor, c.row, c.column] for p, c in zip(levels, here, strict=True)]
        pixels = [decode(r, c, a) * stride for r, c, a, stride in zip(raw, here, scaled, strides, strict=True)]
        everything = torch.cat(raw)
        size = boxes.xywh.new_tensor([levels[0].shape[3], levels[0].shape[2]]).repeat(2) * strides[0]
        overlap = overlaps(corners(boxes.xywh[numbers] * size), corners(torch.cat(pixels)))
        cost = class_costs(boxes.label[numbers], everything[:, 4], everything[:, 5:])
        cost = cost + OVERLAP_WEIGHT * -torch.log(overlap + _EPSILON)
        for level, (places, own) in enumerate(zip(here, match(cost, overlap).split(counts), strict=True)):
            which = (own >= 0).nonzero().squeeze(1)
            found[level].append(Matches(places.take(which), numbers[own[which]]))
    return [_joined(matches, boxes) for matches in found]


def _joined(matches: Sequence[Matches], boxes: Boxes) -> Matches:
    none = boxes.label.new_zeros(0)
    parts = [(m.places.image, m.places.anchor, m.places.row, m.places.column, m.box) for m in matches]
    image, anchor, row, column, box = (torch.cat(column) for column in zip((none,) * 5, *parts, strict=True))
    return Matches(Places(image, anchor, row, column), box)


def complete_overlap(predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the complete IoU of n pairs of boxes: overlap, distance of the centres, difference of shape. The boxes are
    (n, 4): centres and sizes.

    Source: Zheng et al., "Distance-IoU Loss" (2020), arXiv 1911.08287.
    """
    first, second = corners(predicted), corners(wanted)
    shared = (torch.minimum(first[:, 2:], second[:, 2:]) - torch.maximum(first[:, :2], second[:, :2])).clamp(min=0)
    # Products are written out: the gradient of `torch.prod` asks on the host whether a factor is zero.
    overlap = shared[:, 0] * shared[:, 1]
    union = predicted[:, 2] * predicted[:, 3] + wanted[:, 2] * wanted[:, 3] - overlap + _EPSILON
    iou = overlap / union
    hull = torch.maximum(first[:, 2:], second[:, 2:]) - torch.minimum(first[:, :2], second[:, :2])
    distance = (predicted[:, :2] - wanted[:, :2]).square().sum(dim=1) / (hull.square().sum(dim=1) + _EPSILON)
    angles = [torch.atan(box[:, 2] / (box[:, 3] + _EPSILON)) for box in (wanted, predicted)]
    shape = 4 / torch.pi**2 * (angles[0] - angles[1]).square()
    with torch.no_grad():
        weight = shape / (1 - iou + shape + _EPSILON)
    return iou - distance - weight * shape
