"""SimOTA of a batch, in each formulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_timing import DEVICE, Clock, Times, captured, timed
from torch import Tensor

from steptune.kernels import simota

STRIDES = (8, 16, 32)
TIES = 1e-3
"""Share of assigned candidates that may differ: sums of overlaps within rounding of an integer, equal costs."""


def priors(size: int) -> Tensor:
    """Centres of all cells and their strides."""
    found = []
    for stride in STRIDES:
        places = (torch.arange(size // stride) + 0.5) * stride
        y, x = torch.meshgrid(places, places, indexing="ij")
        found.append(torch.stack([x.flatten(), y.flatten(), torch.full((x.numel(),), float(stride))], 1))
    return torch.cat(found)


def inputs(batch: int, candidates: int, boxes: int, num_classes: int, size: int) -> dict[str, Tensor]:
    """Predictions around random places, and boxes of which an image has none to all."""
    generator = torch.Generator().manual_seed(0)

    def corners(count: int, near: Tensor | None = None) -> Tensor:
        extent = 16 + 0.4 * size * torch.rand(batch, count, 2, generator=generator) ** 2
        centre = torch.rand(batch, count, 2, generator=generator) * size if near is None else near
        return torch.cat([centre - extent / 2, centre + extent / 2], -1)

    labels = torch.randint(num_classes, (batch, boxes), generator=generator)
    counts = torch.randint(boxes + 1, (batch, 1), generator=generator)
    labels[torch.arange(boxes) >= counts] = -1
    all_cells = priors(size)
    near = None
    if len(all_cells) == candidates:
        near = all_cells[:, :2] + 4 * torch.randn(batch, candidates, 2, generator=generator)
    given = {
        "boxes_bm4": corners(candidates, near),
        "objectness_bm": torch.randn(batch, candidates, generator=generator) - 2,
        "classes_bmk": torch.randn(batch, candidates, num_classes, generator=generator) - 2,
        "wanted_bg4": corners(boxes),
        "labels_bg": labels,
    }
    if near is None:
        given["valid_bm"] = torch.rand(batch, candidates, generator=generator) < 0.7
    else:
        given["priors_m3"] = all_cells
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}


def by_batch(
    boxes_bm4: Tensor,
    objectness_bm: Tensor,
    classes_bmk: Tensor,
    wanted_bg4: Tensor,
    labels_bg: Tensor,
    valid_bm: Tensor | None = None,
    priors_m3: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch for the whole batch at once, on tensors that are filled up: no size depends on the data."""
    is_box = labels_bg >= 0
    low = torch.maximum(wanted_bg4[:, :, None, :2], boxes_bm4[:, None, :, :2])
    high = torch.minimum(wanted_bg4[:, :, None, 2:], boxes_bm4[:, None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(box[..., 2:] - box[..., :2]).prod(-1) for box in (wanted_bg4, boxes_bm4)]
    overlap = shared / (areas[0][:, :, None] + areas[1][:, None] - shared)
    probability = (classes_bmk.sigmoid() * objectness_bm.sigmoid()[..., None]).sqrt()
    right = -probability.log().clamp(min=-100)
    wrong = -torch.log1p(-probability).clamp(min=-100)
    index = labels_bg.clamp(min=0)[:, None].expand(-1, boxes_bm4.shape[1], -1)
    cost = (wrong.sum(-1)[..., None] + (right - wrong).gather(2, index)).transpose(1, 2)
    cost = cost - 3.0 * torch.log(overlap + 1e-8)
    counted = is_box[:, :, None] if valid_bm is None else is_box[:, :, None] & valid_bm[:, None]
    if priors_m3 is not None:
        x, y, stride = priors_m3.unbind(1)
        left, top, right_side, bottom = (side[:, :, None] for side in wanted_bg4.unbind(-1))
        in_box = (x > left) & (y > top) & (x < right_side) & (y < bottom)
        reach = 2.5 * stride
        in_centre = ((x - (left + right_side) / 2).abs() < reach) & ((y - (top + bottom) / 2).abs() < reach)
        near = ((in_box | in_centre) & is_box[:, :, None]).any(1, keepdim=True)
        counted = counted & near
        cost = torch.where(in_box & in_centre, cost, cost + 1e5)
    cost = torch.where(counted, cost, float("inf"))
    overlap = torch.where(counted, overlap, 0.0)
    counts = overlap.topk(10, dim=-1).values.sum(-1).int().clamp(min=1)
    values, places = cost.topk(10, dim=-1, largest=False)
    takes = (torch.arange(10, device=cost.device) < counts[..., None]) & values.isfinite()
    taken = torch.zeros_like(cost, dtype=torch.bool).scatter(-1, places, takes)
    chosen = torch.where(taken.sum(1) > 1, cost.argmin(1), taken.int().argmax(1))
    return torch.where(taken.any(1), chosen, -1)


def times(function: Callable[..., Tensor], given: dict[str, Tensor], wanted: Tensor | None, *, graph: bool) -> Times:
    """Time an assignment that is that of the loop.

    Raises:
        ValueError: It is not.
    """
    if wanted is not None:
        wrong = float((function(**given) != wanted).sum()) / max(1, int((wanted >= 0).sum()))
        if not wrong <= TIES:
            raise ValueError(f"another box at {wrong:.3g} of the assigned candidates")

    def call() -> Tensor:
        return function(**given)

    return {"batch": timed(captured(call) if graph else call)}


SIZES = (("all cells of 640 x 640 (YOLOX)", 8400, 640), ("540 candidates an image (YOLOv7)", 540, 640))
BATCH, BOXES, CLASSES = 64, 20, 80


def fill_cache() -> None:
    """Compile the formulation for the whole batch, as a process beside others may."""
    for _, candidates, size in SIZES:
        torch._dynamo.reset()
        torch.compile(by_batch, dynamic=False)(**inputs(BATCH, candidates, BOXES, CLASSES, size))


def rows(rate: float, clock: Clock, *, small: bool = False) -> Iterator[dict]:
    """One row a kind of candidates.

    Args:
        small: Tries the script on a CPU.
    """
    batch, boxes, classes = (2, 5, 7) if small else (BATCH, BOXES, CLASSES)
    for name, candidates, size in SIZES:
        if small and candidates == 8400:
            candidates, size = len(priors(64)), 64
        given = inputs(batch, candidates, boxes, classes, size)
        wanted = simota.reference(**given)
        moved = batch * (candidates * (classes + 5) * 4 + candidates * 8)
        torch._dynamo.reset()
        compiled: Any = torch.compile(by_batch, dynamic=False)
        ways: dict[str, Callable[[], Times]] = {
            "ours": lambda g=given, w=wanted: times(simota.assign, g, w, graph=False),
            "graph": lambda g=given, w=wanted: times(simota.assign, g, w, graph=True),
            "loop": lambda g=given: times(simota.reference, g, None, graph=False),
            "whole batch": lambda g=given, w=wanted: times(by_batch, g, w, graph=False),
            "whole batch, graph": lambda g=given, w=wanted: times(by_batch, g, w, graph=True),
        }
        if not small:
            ways["whole batch, compiled"] = lambda g=given, w=wanted, c=compiled: times(c, g, w, graph=False)
        yield {
            "kernel": "simota",
            "case": f"{name}, batch {batch}, {boxes} boxes, {classes} classes, {int((wanted >= 0).sum())} assigned",
            "floor_us": {"batch": moved / rate * 1e6},
            "times": {label: clock.attempt(way) for label, way in ways.items()},
        }
