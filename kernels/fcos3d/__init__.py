"""Target assignment of FCOS3D for a whole batch, without a host synchronisation; README.md derives it, `reference.py`
defines it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from steptune.kernels.fcos3d.reference import Points, Scenes, Targets
from steptune.kernels.fcos3d.reference import targets as reference
from steptune.kernels.triton_device import is_traced

__all__ = ["Assigner", "FusedAssigner", "Points", "Scenes", "Targets", "reference", "targets"]

MAX_BOXES = 256
"""Maximum number of boxes per image: every program tests all of them."""
BLOCK_P = 128
"""Points per program, one per thread: 242 programs for the 30,929 points of a nuScenes image."""
BOXES_STEP = 8
"""Multiple to which the number of boxes per program is rounded up, so that few variants are compiled."""


class Assigner:
    """Target assignment as a part of a loss: computed image by image unless `fused_kernels` replaces it."""

    def __call__(self, points: Points, scenes: Scenes, num_classes: int, num_attributes: int) -> Targets:
        return reference(points, scenes, num_classes, num_attributes)


class FusedAssigner(Assigner):
    def __call__(self, points: Points, scenes: Scenes, num_classes: int, num_attributes: int) -> Targets:
        return targets(points, scenes, num_classes, num_attributes)


@torch.no_grad()
def targets(points: Points, scenes: Scenes, num_classes: int, num_attributes: int) -> Targets:
    """Return the targets of a batch, in one launch whose size does not depend on the data.

    Raises:
        ValueError: The boxes are padded to more than `MAX_BOXES` per image.
    """
    if scenes.label.shape[1] > MAX_BOXES:
        raise ValueError(
            f"FCOS3D supports at most {MAX_BOXES} boxes per image, got {scenes.label.shape[1]}: pass fewer "
            "boxes, or train without the kernel"
        )
    function: Callable[..., tuple[Tensor, ...]] = _targets if is_traced(points.xy) else _run_targets
    found = function(
        *(getattr(points, name) for name in Points.__dataclass_fields__),
        *(getattr(scenes, name) for name in Scenes.__dataclass_fields__),
        num_classes,
        num_attributes,
    )
    return Targets(*found)


def _run_targets(
    xy: Tensor,
    stride: Tensor,
    low: Tensor,
    high: Tensor,
    corners: Tensor,
    label: Tensor,
    attribute: Tensor,
    centre: Tensor,
    depth: Tensor,
    box: Tensor,
    num_classes: int,
    num_attributes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from steptune.kernels.fcos3d import kernel

    batch, num_boxes = label.shape
    num_points, device = len(xy), xy.device
    found = (
        torch.empty((batch, num_points), dtype=label.dtype, device=device),
        torch.empty((batch, num_points), dtype=attribute.dtype, device=device),
        torch.empty((batch, num_points, 4), dtype=torch.float32, device=device),
        torch.empty((batch, num_points, 9), dtype=torch.float32, device=device),
        torch.empty((batch, num_points), dtype=torch.float32, device=device),
    )
    if not num_boxes or not found[0].numel():
        found[0].fill_(num_classes)
        found[1].fill_(num_attributes)
        for tensor in found[2:]:
            tensor.zero_()
        return found
    kernel.fcos3d_targets[(-(-num_points // BLOCK_P), batch)](
        *(own.float().contiguous() for own in (xy, stride, low, high)),
        corners.float().contiguous(),
        label.contiguous(),
        attribute.contiguous(),
        centre.float().contiguous(),
        depth.float().contiguous(),
        box.float().contiguous(),
        *found,
        num_points,
        num_boxes,
        num_classes,
        num_attributes,
        BLOCK_P=BLOCK_P,
        BOXES=-(-num_boxes // BOXES_STEP) * BOXES_STEP,
    )
    return found


_targets = torch.library.custom_op("steptune::fcos3d_targets", _run_targets, mutates_args=())


@_targets.register_fake
def _(
    xy: Tensor,
    stride: Tensor,
    low: Tensor,
    high: Tensor,
    corners: Tensor,
    label: Tensor,
    attribute: Tensor,
    centre: Tensor,
    depth: Tensor,
    box: Tensor,
    num_classes: int,
    num_attributes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = (len(label), len(xy))
    return (
        label.new_empty(shape),
        attribute.new_empty(shape),
        xy.new_empty((*shape, 4), dtype=torch.float32),
        xy.new_empty((*shape, 9), dtype=torch.float32),
        xy.new_empty(shape, dtype=torch.float32),
    )
