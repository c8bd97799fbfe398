"""FCOS3D's targets: which points of a dense head learn which 3-D boxes, and what.

A point may learn a box when it lies within a square around the box's projected centre and the box's
extent belongs to the point's level; of several boxes it learns the one whose projected centre is nearest.

This is the plain form, image by image, over all pairs of points and boxes. mmdetection3d's code turns the
yaw of the boxes it is given into the local one in place, so that calling it twice subtracts twice; here
nothing is changed in place. It also indexes with a Python `range`, which becomes a list, a tensor on the
host and a copy in every call; here the index is made on the device.

Source: open-mmlab/mmdetection3d, mmdet3d/models/dense_heads/fcos_mono3d_head.py; Wang et al., "FCOS3D"
(2021), arXiv 2104.10956.

Shapes: P points of all levels, G boxes of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

REGRESS_RANGES = ((-1.0, 48.0), (48.0, 96.0), (96.0, 192.0), (192.0, 384.0), (384.0, 1e8))
"""Extents in pixels that each level learns."""
RADIUS = 1.5
"""Half the square around a projected centre, in strides."""
CENTERNESS_ALPHA = 2.5
FAR = 1e8


@dataclass(frozen=True)
class Points:
    """Where the head predicts.

    Attributes:
        xy: (P, 2), pixels.
        stride: (P).
        low: (P), the least extent that the point's level learns; `high`, the largest.
    """

    xy: torch.Tensor
    stride: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True)
class Scene:
    """The boxes of one image.

    Attributes:
        corners: (G, 4), left, top, right, bottom of the 2-D boxes in pixels.
        label: (G).
        attribute: (G).
        centre: (G, 2), projected centres in pixels.
        depth: (G).
        box: (G, 9), x, y, z, three sizes, yaw, two velocities.
    """

    corners: torch.Tensor
    label: torch.Tensor
    attribute: torch.Tensor
    centre: torch.Tensor
    depth: torch.Tensor
    box: torch.Tensor


@dataclass(frozen=True)
class Targets:
    """Targets of the points of one image. Points of the background have figures too, which no loss uses.

    Attributes:
        label: (P), the number of classes for the background.
        attribute: (P), the number of attributes for the background.
        distances: (P, 4), to the left, top, right and bottom of the 2-D box.
        box: (P, 9), offset to the projected centre, depth, three sizes, local yaw, two velocities.
        centerness: (P).
    """

    label: torch.Tensor
    attribute: torch.Tensor
    distances: torch.Tensor
    box: torch.Tensor
    centerness: torch.Tensor


def make_points(sizes: Sequence[tuple[int, int]], strides: Sequence[int], device: torch.device) -> Points:
    """The middles of all cells, level by level, row by row.

    Args:
        sizes: Rows and columns of each level.
    """
    places, marks = [], []
    for (rows, columns), stride, (low, high) in zip(sizes, strides, REGRESS_RANGES, strict=False):
        y = torch.arange(rows, device=device).float() * stride + stride // 2
        x = torch.arange(columns, device=device).float() * stride + stride // 2
        places.append(torch.stack([x.repeat(rows), y.repeat_interleave(columns)], dim=1))
        marks.append(torch.tensor([stride, low, high], device=device).expand(rows * columns, 3))
    return Points(torch.cat(places), *torch.cat(marks).unbind(dim=1))


def local_yaw(box: torch.Tensor) -> torch.Tensor:
    """The boxes with the yaw that the camera sees: less the direction in which they lie."""
    yaw = box[:, 6] - torch.atan2(box[:, 0], box[:, 2])
    return torch.cat([box[:, :6], yaw[:, None], box[:, 7:]], dim=1)


@torch.no_grad()
def make_targets(points: Points, scene: Scene, num_classes: int, num_attributes: int) -> Targets:
    """The targets of one image."""
    num_points = len(points.xy)
    if not len(scene.label):
        zeros = points.xy.new_zeros
        return Targets(
            scene.label.new_full((num_points,), num_classes),
            scene.attribute.new_full((num_points,), num_attributes),
            zeros(num_points, 4),
            zeros(num_points, 9),
            zeros(num_points),
        )
    distances = torch.cat(
        [points.xy[:, None] - scene.corners[None, :, :2], scene.corners[None, :, 2:] - points.xy[:, None]], dim=2
    )
    offset = points.xy[:, None] - scene.centre[None]
    reach = points.stride[:, None] * RADIUS
    extent = distances.amax(dim=2)
    near = (reach - offset.abs().amax(dim=2)) > 0
    fits = (extent >= points.low[:, None]) & (extent <= points.high[:, None])
    distance, nearest = torch.where(near & fits, offset.norm(dim=2), FAR).min(dim=1)
    background = distance == FAR
    each = torch.arange(num_points, device=nearest.device)
    chosen = offset[each, nearest]
    box = torch.cat([chosen, scene.depth[nearest, None], local_yaw(scene.box)[nearest, 3:]], dim=1)
    relative = chosen.norm(dim=1) / (1.414 * points.stride * RADIUS)
    return Targets(
        scene.label[nearest].masked_fill(background, num_classes),
        scene.attribute[nearest].masked_fill(background, num_attributes),
        distances[each, nearest],
        box,
        torch.exp(-CENTERNESS_ALPHA * relative),
    )
