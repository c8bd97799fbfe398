"""FCOS3D's targets of a batch in each formulation, and the compaction of its pairs by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_timing import DEVICE, Clock, Times, captured, timed
from torch import Tensor

from steptune.kernels import compaction, fcos3d
from steptune.tuner.workloads.zoo.fcos3d import make_points
from steptune.tuner.workloads.zoo.monocular_3d import STRIDES, RandomRoads

SIZES = ((116, 200), (58, 100), (29, 50), (15, 25), (8, 13))
"""Sizes of the feature maps of nuScenes' images of 1600 x 928: 30,929 points."""
KINDS = (10, 9)
TOLERANCE = 1e-4


def inputs(batch: int, boxes: int, sizes: tuple[tuple[int, int], ...]) -> tuple[fcos3d.Points, fcos3d.Scenes]:
    roads = RandomRoads(batch, (sizes[0][0] * 8, sizes[0][1] * 8), *KINDS, boxes)
    samples = [roads[number] for number in range(batch)]
    names = ("corners", "labels", "attributes", "centres", "depths", "boxes")
    scenes = fcos3d.Scenes(*(torch.stack([sample[name] for sample in samples]).to(DEVICE) for name in names))
    return make_points(sizes, STRIDES, DEVICE), scenes


def check(found: fcos3d.Targets, wanted: fcos3d.Targets) -> None:
    """Compare what a loss uses of two results.

    Raises:
        ValueError: They differ.
    """
    if not torch.equal(found.label, wanted.label) or not torch.equal(found.attribute, wanted.attribute):
        raise ValueError(f"other labels at {int((found.label != wanted.label).sum())} points")
    learns = wanted.label < KINDS[0]
    for name in ("distances", "box", "centerness"):
        pairs = getattr(found, name)[learns], getattr(wanted, name)[learns]
        if float((pairs[0] - pairs[1]).abs().max()) > TOLERANCE * float(pairs[1].abs().max()):
            raise ValueError(f"other {name}")


def times(function: Callable[..., fcos3d.Targets], given: Any, wanted: fcos3d.Targets, *, graph: bool = False) -> Times:
    check(function(*given, *KINDS), wanted)
    return {"batch": timed(captured(lambda: function(*given, *KINDS)) if graph else lambda: function(*given, *KINDS))}


def compaction_rows(rate: float, clock: Clock, boxes: int, sizes: tuple[tuple[int, int], ...]) -> dict:
    """Take of each point the figures of one box: (P, G, 4) and (P, G, 9) to (P, 4) and (P, 9)."""
    num_points = sum(rows * columns for rows, columns in sizes)
    pairs = [torch.randn(num_points, boxes, parts, device=DEVICE) for parts in (4, 9)]
    nearest = torch.randint(boxes, (num_points,), device=DEVICE)

    def by_range() -> list[Tensor]:
        return [pair[range(num_points), nearest] for pair in pairs]

    def by_arange() -> list[Tensor]:
        each = torch.arange(num_points, device=DEVICE)
        return [pair[each, nearest] for pair in pairs]

    def by_gather() -> list[Tensor]:
        return [pair.gather(1, nearest[:, None, None].expand(-1, 1, pair.shape[2])).squeeze(1) for pair in pairs]

    def by_kernel() -> list[Tensor]:
        return compaction.compact((pairs[0], pairs[1]), nearest)

    wanted = compaction.reference(pairs, nearest)
    for function in (by_range, by_gather, by_kernel):
        if not all(torch.equal(a, b) for a, b in zip(function(), wanted, strict=True)):
            raise ValueError(f"{function.__name__} takes other figures")
    return {
        "kernel": "compaction",
        "case": f"{num_points} points, {boxes} boxes",
        "floor_us": {"image": num_points * (2 * 13 * 4 + 8) / rate * 1e6},
        "times": {
            "ours": clock.attempt(lambda: {"image": timed(by_kernel)}),
            "graph": clock.attempt(lambda: {"image": timed(captured(by_kernel))}),
            "range": clock.attempt(lambda: {"image": timed(by_range)}),
            "arange": clock.attempt(lambda: {"image": timed(by_arange)}),
            "arange, graph": clock.attempt(lambda: {"image": timed(captured(by_arange))}),
            "gather": clock.attempt(lambda: {"image": timed(by_gather)}),
            "gather, graph": clock.attempt(lambda: {"image": timed(captured(by_gather))}),
        },
    }


def rows(rate: float, clock: Clock, *, small: bool = False) -> Iterator[dict]:
    """One row a size of the batch.

    Args:
        small: Tries the script on a CPU.
    """
    sizes = ((8, 16), (4, 8)) if small else SIZES
    boxes = 5 if small else 40
    for batch in (2,) if small else (16, 8, 4, 1):
        given = inputs(batch, boxes, sizes)
        wanted = fcos3d.reference(*given, *KINDS)
        num_points = len(given[0].xy)
        ways: dict[str, Callable[[], Times]] = {
            "ours": lambda g=given, w=wanted: times(fcos3d.targets, g, w),
            "graph": lambda g=given, w=wanted: times(fcos3d.targets, g, w, graph=True),
            "loop": lambda g=given, w=wanted: times(fcos3d.reference, g, w),
        }
        yield {
            "kernel": "fcos3d",
            "case": f"{num_points} points, batch {batch}, up to {boxes} boxes",
            "floor_us": {"batch": batch * num_points * (2 * 8 + 14 * 4) / rate * 1e6},
            "times": {label: clock.attempt(way) for label, way in ways.items()},
        }
    yield compaction_rows(rate, clock, boxes, sizes)
