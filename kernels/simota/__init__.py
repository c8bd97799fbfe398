"""SimOTA for a whole batch without a host synchronisation; README.md derives it, `reference.py` defines it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from steptune.kernels.simota.reference import assign as reference

__all__ = ["Assigner", "FusedAssigner", "assign", "reference"]

MAX_CANDIDATES = 16384
"""Maximum number of candidates per image: one program handles all candidates of a box."""
MAX_BOXES = 1024
MAX_TOP = 32


class Assigner:
    """Assignment of boxes to candidates, as a part of a loss. It is computed image by image unless `fused_kernels`
    replaces it by the kernel.

    Attributes:
        in_one_pass: Whether the assigner never waits for the device: passing a fixed number of candidates then beats
            filtering them.
    """

    in_one_pass: ClassVar[bool] = False

    def __call__(self, *predictions: Tensor, **options: Any) -> Tensor:
        return reference(*predictions, **options)


class FusedAssigner(Assigner):
    in_one_pass = True

    def __call__(self, *predictions: Tensor, **options: Any) -> Tensor:
        return assign(*predictions, **options)


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
    """Assign a box, or none, to each candidate, in three launches whose sizes do not depend on the data.

    Args:
        boxes_bm4: Predicted boxes (B, M, 4): left, top, right, bottom; as the other predictions of any strides.
        objectness_bm: Before the sigmoid, (B, M).
        classes_bmk: Before the sigmoid, (B, M, K).
        wanted_bg4: Boxes of the images, filled up to G, (B, G, 4).
        labels_bg: Classes of these boxes; -1 where the image has no such box, integer (B, G).
        valid_bm: Which candidates count, bool (B, M); None takes all.
        priors_m3: Each candidate's place and stride (x, y, stride), (M, 3): those neither in a box nor within
            `radius` strides of its centre do not count, those not in both are taken last. None leaves this out.
        radius: Maximum distance from a box's centre, in strides.
        top: Number of largest overlaps that are summed.
        overlap_weight: Weight of the overlap's logarithm in the cost.

    Returns:
        Number of the box (of G) that each candidate learns, or -1: int64 (B, M).

    Raises:
        ValueError: The sizes exceed the kernel's limits.
    """
    num_candidates, num_boxes = objectness_bm.shape[1], labels_bg.shape[1]
    for name, size, most in (
        ("candidates", num_candidates, MAX_CANDIDATES),
        ("boxes", num_boxes, MAX_BOXES),
        ("top", top, MAX_TOP),
    ):
        if size > most:
            raise ValueError(f"SimOTA supports at most {most} {name} per image, got {size}")
    if not num_candidates or not num_boxes:
        return torch.full(objectness_bm.shape, -1, dtype=torch.int64, device=objectness_bm.device)
    found: Tensor = _assign(
        boxes_bm4, objectness_bm, classes_bmk, wanted_bg4, labels_bg, valid_bm, priors_m3, radius, top, overlap_weight
    )
    return found


@torch.library.custom_op("steptune::simota_assign", mutates_args=())
def _assign(
    boxes: Tensor,
    objectness: Tensor,
    classes: Tensor,
    wanted: Tensor,
    labels: Tensor,
    valid: Tensor | None,
    priors: Tensor | None,
    radius: float,
    top: int,
    overlap_weight: float,
) -> Tensor:
    from steptune.kernels.simota import kernel

    batch, candidates, num_classes = classes.shape
    num_boxes, device = labels.shape[1], boxes.device
    wanted, labels = wanted.float().contiguous(), labels.contiguous()
    places = labels if priors is None else priors.float().contiguous()
    sums = torch.empty((batch, candidates), dtype=torch.float32, device=device)
    counts = torch.empty((batch, candidates), dtype=torch.int8, device=device)
    costs = torch.empty((batch, num_boxes, candidates), dtype=torch.float32, device=device)
    taken = torch.empty((batch, num_boxes, candidates), dtype=torch.int8, device=device)
    found = torch.empty((batch, candidates), dtype=torch.int64, device=device)
    block_k = min(128, _power_of_two(num_classes))
    block_g = max(2, _power_of_two(num_boxes))
    block_m = max(16, min(128, 4096 // max(block_g, block_k)))
    strides = (*objectness.stride(), *classes.stride())
    kernel.simota_candidates[(-(-candidates // block_m), batch)](
        objectness,
        classes,
        wanted,
        labels,
        labels if valid is None else valid.contiguous().view(torch.int8),
        places,
        radius,
        sums,
        counts,
        candidates,
        num_boxes,
        num_classes,
        *strides,
        HAS_VALID=valid is not None,
        HAS_PRIORS=priors is not None,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        CLASS_BLOCKS=-(-num_classes // block_k),
        BLOCK_G=block_g,
    )
    whole = max(16, _power_of_two(candidates))
    kernel.simota_choices[(num_boxes, batch)](
        boxes,
        objectness,
        classes,
        wanted,
        labels,
        places,
        radius,
        sums,
        counts,
        costs,
        taken,
        candidates,
        num_boxes,
        *boxes.stride(),
        *strides,
        overlap_weight,
        HAS_PRIORS=priors is not None,
        TOP=top,
        BLOCK_M=whole,
        num_warps=max(1, min(16, whole // 256)),
    )
    kernel.simota_conflicts[(-(-candidates // block_m), batch)](
        costs, taken, found, candidates, num_boxes, BLOCK_M=block_m, BLOCK_G=block_g
    )
    return found


@_assign.register_fake
def _(
    boxes: Tensor,
    objectness: Tensor,
    classes: Tensor,
    wanted: Tensor,
    labels: Tensor,
    valid: Tensor | None,
    priors: Tensor | None,
    radius: float,
    top: int,
    overlap_weight: float,
) -> Tensor:
    return objectness.new_empty(objectness.shape, dtype=torch.int64)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
