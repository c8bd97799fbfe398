"""SimOTA image by image (Ge et al., "YOLOX: Exceeding YOLO Series in 2021", arXiv 2107.08430, section 2.2).

B images, M candidates and G boxes of an image, K classes. Boxes are corners: left, top, right, bottom.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8
LEAST_LOGARITHM = -100.0
"""Minimum of a logarithm in a binary cross-entropy term, as in torch."""
OUTSIDE = 1e5
"""Cost added for a prior that is not both inside a box and near its centre."""


@torch.no_grad()
def assign(
    boxes_bm4: Tensor,
    objectness_bm: Tensor,
    classes_bmk: Tensor,
    wanted_bg4: Tensor,
    labels_bg: Tensor,
    *,
    valid_bm: Tensor | None = None,
    priors_m3: Tensor | None = None,
    radius: float = 2.5,
    top: int = 10,
    overlap_weight: float = 3.0,
) -> Tensor:
    """Assign a box, or none, to each candidate.

    Each box takes its cheapest candidates, as many as the sum of its `top` largest overlaps; a candidate that
    several boxes took goes to the box with the lowest cost, of all boxes of the image. Of equal costs the first counts.

    Args:
        boxes_bm4: Predicted boxes (B, M, 4).
        objectness_bm: Before the sigmoid, (B, M).
        classes_bmk: Before the sigmoid, (B, M, K).
        wanted_bg4: Boxes of the images, filled up to G, (B, G, 4).
        labels_bg: Classes of these boxes; -1 where the image has no such box, (B, G).
        valid_bm: Which candidates count, bool (B, M); None takes all.
        priors_m3: Each candidate's place and stride (x, y, stride), (M, 3): those neither in a box nor within
            `radius` strides of its centre do not count, those not in both are taken last. None leaves this out.
        radius: Maximum distance from a box's centre, in strides.
        top: Number of largest overlaps that are summed.
        overlap_weight: Weight of the overlap's logarithm in the cost.

    Returns:
        Number of the box (of G) that each candidate learns, or -1: int64 (B, M).
    """
    found = torch.full(objectness_bm.shape, -1, dtype=torch.int64, device=boxes_bm4.device)
    for image in range(len(boxes_bm4)):
        numbers = (labels_bg[image] >= 0).nonzero().squeeze(1)
        wanted, labels = wanted_bg4[image, numbers], labels_bg[image, numbers]
        is_valid = torch.ones_like(found[image], dtype=torch.bool) if valid_bm is None else valid_bm[image]
        inside = None
        if priors_m3 is not None:
            in_box, in_centre = _places(priors_m3.to(wanted.dtype), wanted, radius)
            is_valid = is_valid & (in_box | in_centre).any(0)
            inside = in_box & in_centre
        candidates = is_valid.nonzero().squeeze(1)
        if not len(numbers) or not len(candidates):
            continue
        overlap = _overlaps(wanted, boxes_bm4[image, candidates])
        cost = _class_costs(labels, objectness_bm[image, candidates], classes_bmk[image, candidates])
        cost = cost - overlap_weight * torch.log(overlap + EPSILON)
        if inside is not None:
            cost = cost + OUTSIDE * ~inside[:, candidates]
        matched = _match(cost, overlap, top)
        found[image, candidates] = torch.where(matched >= 0, numbers[matched.clamp(min=0)], -1)
    return found


def _places(priors_m3: Tensor, wanted_g4: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Return two masks of shape (G, M): the priors inside each box, and the priors near its centre."""
    x, y, stride = priors_m3.unbind(1)
    left, top, right, bottom = (side[:, None] for side in wanted_g4.unbind(1))
    in_box = (x > left) & (y > top) & (x < right) & (y < bottom)
    reach = radius * stride
    in_centre = ((x - (left + right) / 2).abs() < reach) & ((y - (top + bottom) / 2).abs() < reach)
    return in_box, in_centre


def _overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of each of G boxes with each of M boxes, in shape (G, M)."""
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    areas = [(box[:, 2:] - box[:, :2]).prod(1) for box in (first, second)]
    return shared / (areas[0][:, None] + areas[1] - shared)


def _class_costs(labels: Tensor, objectness: Tensor, classes: Tensor) -> Tensor:
    """Return the binary cross-entropy of p = sqrt(class probability * objectness), summed over classes, as (G, M)."""
    probability = (classes.sigmoid() * objectness.sigmoid()[:, None]).sqrt()
    right = -probability.log().clamp(min=LEAST_LOGARITHM)
    wrong = -torch.log1p(-probability).clamp(min=LEAST_LOGARITHM)
    return (wrong.sum(1)[:, None] - wrong[:, labels] + right[:, labels]).t()


def _match(cost: Tensor, overlap: Tensor, top: int) -> Tensor:
    """Return the index of each candidate's box for one image; -1 for a candidate without a box."""
    counts = overlap.topk(min(top, overlap.shape[1]), dim=1).values.sum(1).int().clamp(min=1)
    taken = torch.zeros_like(cost, dtype=torch.bool)
    for box, count in enumerate(counts.tolist()):
        taken[box, cost[box].argsort(stable=True)[:count]] = True
    chosen = torch.where(taken.sum(0) > 1, cost.argmin(0), taken.int().argmax(0))
    return torch.where(taken.any(0), chosen, -1)
