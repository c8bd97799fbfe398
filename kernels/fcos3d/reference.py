"""FCOS3D's targets image by image, over all pairs of points and boxes (Wang et al. 2021, arXiv 2104.10956).

A point may learn a box when it lies within a square around the box's projected centre and the box's extent belongs to
the point's level; of several boxes it learns the one whose projected centre is nearest.

mmdetection3d's code (mmdet3d/models/dense_heads/fcos_mono3d_head.py) turns the yaw of the boxes it is given into the
local one in place, so that calling it twice subtracts twice; here nothing is changed in place. It also indexes with a
Python `range`, which becomes a list, a tensor on the host and a copy in every call; here the index is made on the
device.

B images, P points of all levels, G boxes of an image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RADIUS = 1.5
"""Half the side length, in strides, of a square around a box's projected centre; points within it may get the box as
target.
"""
CENTERNESS_ALPHA = 2.5
DIAGONAL = 1.414
FAR = 1e8


@dataclass(frozen=True)
class Points:
    """Points at which the detection head predicts.

    Attributes:
        xy: (P, 2), pixels.
        stride: (P).
        low: (P), the least extent that the point's level learns; `high`, the largest.
    """

    xy: Tensor
    stride: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True)
class Scenes:
    """Boxes of a batch's images, padded to G per image; the first dimension is absent for a single image.

    Attributes:
        corners: (B, G, 4), left, top, right, bottom of the 2-D boxes in pixels.
        label: (B, G); -1 where the image has no such box.
        attribute: (B, G).
        centre: (B, G, 2), projected centres in pixels.
        depth: (B, G).
        box: (B, G, 9), x, y, z, three sizes, yaw, two velocities.
    """

    corners: Tensor
    label: Tensor
    attribute: Tensor
    centre: Tensor
    depth: Tensor
    box: Tensor


@dataclass(frozen=True)
class Targets:
    """Targets of the points, (B, P, ...); the first dimension is absent for a single image.

    Background points have box values too, which no loss uses.

    Attributes:
        label: (B, P), the number of classes for the background.
        attribute: (B, P), the number of attributes for the background.
        distances: (B, P, 4), to the left, top, right and bottom of the 2-D box.
        box: (B, P, 9), offset to the projected centre, depth, three sizes, local yaw, two velocities.
        centerness: (B, P).
    """

    label: Tensor
    attribute: Tensor
    distances: Tensor
    box: Tensor
    centerness: Tensor


@torch.no_grad()
def targets(points: Points, scenes: Scenes, num_classes: int, num_attributes: int) -> Targets:
    """Return the targets of a batch."""
    found = []
    for image, labels in enumerate(scenes.label):
        which = (labels >= 0).nonzero().squeeze(1)
        own = Scenes(*(getattr(scenes, name)[image, which] for name in Scenes.__dataclass_fields__))
        found.append(targets_of_image(points, own, num_classes, num_attributes))
    return Targets(*(torch.stack([getattr(t, name) for t in found]) for name in Targets.__dataclass_fields__))


@torch.no_grad()
def targets_of_image(points: Points, scene: Scenes, num_classes: int, num_attributes: int) -> Targets:
    """Return the targets of one image without padded boxes."""
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
    relative = chosen.norm(dim=1) / (DIAGONAL * points.stride * RADIUS)
    return Targets(
        scene.label[nearest].masked_fill(background, num_classes),
        scene.attribute[nearest].masked_fill(background, num_attributes),
        distances[each, nearest],
        box,
        torch.exp(-CENTERNESS_ALPHA * relative),
    )


def local_yaw(box: Tensor) -> Tensor:
    """Return the boxes with the yaw relative to the camera's viewing direction."""
    yaw = box[:, 6] - torch.atan2(box[:, 0], box[:, 2])
    return torch.cat([box[:, :6], yaw[:, None], box[:, 7:]], dim=1)
