"""FCOS3D's targets, against the rules written out point by point in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptune.kernels.fcos3d import reference
from steptune.kernels.fcos3d.reference import Scenes, targets_of_image
from steptune.tuner.workloads.zoo.fcos3d import REGRESS_RANGES, make_points
from steptune.tuner.workloads.zoo.monocular_3d import STRIDES, box_loss, focal_loss, monocular_loss

NUM_CLASSES, NUM_ATTRIBUTES = 3, 2
SIZES = [(16 * 8 // s, 24 * 8 // s) for s in (8, 16, 32, 64)] + [(1, 2)]
"""Rows and columns of images of 128 x 192 pixels."""


@st.composite
def scenes(draw: st.DrawFn) -> Scenes:
    count = draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    largest = draw(st.sampled_from([20.0, 100.0, 500.0]))
    centre = torch.rand(count, 2, generator=generator) * torch.tensor([192.0, 128.0])
    half = 2 + torch.rand(count, 2, generator=generator) * largest
    shift = torch.randn(count, 2, generator=generator) * 3
    box = torch.randn(count, 9, generator=generator) * 3
    box[:, 2] = box[:, 2].abs() + 1
    return Scenes(
        corners=torch.cat([centre - half, centre + half], dim=1),
        label=torch.randint(NUM_CLASSES, (count,), generator=generator),
        attribute=torch.randint(NUM_ATTRIBUTES, (count,), generator=generator),
        centre=centre + shift,
        depth=box[:, 2],
        box=box,
    )


def slow_point(x: float, y: float, level: int, scene: Scenes) -> tuple[int, bool]:
    """The box that a point learns, or -1, and whether the decision was close."""
    stride, (low, high) = STRIDES[level], REGRESS_RANGES[level]
    best, best_distance, close = -1, 1e8, False
    for number in range(len(scene.label)):
        left, top, right, bottom = scene.corners[number].tolist()
        cx, cy = scene.centre[number].tolist()
        extent = max(x - left, y - top, right - x, bottom - y)
        border = min(x - (cx - 1.5 * stride), y - (cy - 1.5 * stride), cx + 1.5 * stride - x, cy + 1.5 * stride - y)
        close |= min(abs(border), abs(extent - low), abs(extent - high)) < 1e-3
        distance = math.hypot(x - cx, y - cy)
        if border > 0 and low <= extent <= high:
            close |= abs(distance - best_distance) < 1e-3
            if distance < best_distance:
                best, best_distance = number, distance
    return best, close


@given(scenes())
@settings(max_examples=40, deadline=None)
def test_every_point_learns_the_nearest_box_that_fits(scene: Scenes) -> None:
    points = make_points(SIZES, STRIDES, torch.device("cpu"))
    found = targets_of_image(points, scene, NUM_CLASSES, NUM_ATTRIBUTES)
    number = 0
    for level, (rows, columns) in enumerate(SIZES):
        for row in range(rows):
            for column in range(columns):
                x = column * STRIDES[level] + STRIDES[level] // 2
                y = row * STRIDES[level] + STRIDES[level] // 2
                assert points.xy[number].tolist() == [x, y]
                best, close = slow_point(x, y, level, scene)
                if not close:
                    _check_point(found, number, best, (x, y), STRIDES[level], scene)
                number += 1
    assert number == len(points.xy)


def _check_point(found, number: int, best: int, place: tuple[int, int], stride: int, scene: Scenes) -> None:
    if best < 0:
        assert int(found.label[number]) == NUM_CLASSES
        assert int(found.attribute[number]) == NUM_ATTRIBUTES
        return
    x, y = place
    assert int(found.label[number]) == int(scene.label[best])
    assert int(found.attribute[number]) == int(scene.attribute[best])
    left, top, right, bottom = scene.corners[best].tolist()
    assert found.distances[number].tolist() == pytest.approx([x - left, y - top, right - x, bottom - y], abs=1e-3)
    bx, _, bz, *sizes = scene.box[best].tolist()[:6]
    yaw = float(scene.box[best, 6]) - math.atan2(bx, bz)
    cx, cy = scene.centre[best].tolist()
    expected = [x - cx, y - cy, float(scene.depth[best]), *sizes, yaw, *scene.box[best, 7:].tolist()]
    assert found.box[number].tolist() == pytest.approx(expected, abs=1e-3)
    relative = math.hypot(x - cx, y - cy) / (1.414 * stride * 1.5)
    assert float(found.centerness[number]) == pytest.approx(math.exp(-2.5 * relative), abs=1e-4)


def test_calling_twice_gives_the_same_and_changes_no_box() -> None:
    """mmdetection3d's code subtracts the direction from the yaw in place."""
    scene = Scenes(
        corners=torch.tensor([[10.0, 10, 60, 60]]),
        label=torch.tensor([1]),
        attribute=torch.tensor([0]),
        centre=torch.tensor([[36.0, 36.0]]),
        depth=torch.tensor([5.0]),
        box=torch.tensor([[2.0, 1, 5, 1, 2, 3, 0.5, 0, 0]]),
    )
    before = scene.box.clone()
    points = make_points(SIZES, STRIDES, torch.device("cpu"))
    first, second = (targets_of_image(points, scene, NUM_CLASSES, NUM_ATTRIBUTES) for _ in range(2))
    assert torch.equal(first.box, second.box)
    assert torch.equal(scene.box, before)
    assert int((first.label < NUM_CLASSES).sum()) > 0


def test_numbers_of_points_are_those_of_nuscenes_images() -> None:
    """1600 x 928 pixels at five strides."""
    sizes = [(116, 200), (58, 100), (29, 50), (15, 25), (8, 13)]
    assert len(make_points(sizes, STRIDES, torch.device("cpu")).xy) == 30_929


def test_losses_leave_out_points_of_the_background() -> None:
    """Only the loss of the classes is left of a scene without boxes."""
    points = make_points(SIZES, STRIDES, torch.device("cpu"))
    none = torch.full((1, 1), -1)
    empty = Scenes(torch.ones(1, 1, 4), none, none, torch.ones(1, 1, 2), torch.ones(1, 1), torch.ones(1, 1, 9))
    targets = reference(points, empty, NUM_CLASSES, NUM_ATTRIBUTES)
    predictions = torch.randn(1, len(points.xy), NUM_CLASSES + NUM_ATTRIBUTES + 12)
    loss = monocular_loss(predictions, points, targets, NUM_CLASSES, NUM_ATTRIBUTES)
    classes = predictions[0, :, :NUM_CLASSES]
    assert float(loss) == pytest.approx(float(focal_loss(classes, torch.zeros_like(classes)).sum()), rel=1e-5)


def test_focal_loss_is_lin_s_formula() -> None:
    for logit in (-2.0, 0.3, 3.0):
        p = 1 / (1 + math.exp(-logit))
        found = focal_loss(torch.tensor([logit, logit]), torch.tensor([1.0, 0.0]))
        assert found.tolist() == pytest.approx(
            [-0.25 * (1 - p) ** 2 * math.log(p), -0.75 * p**2 * math.log(1 - p)], rel=1e-4
        )


def test_a_yaw_turned_by_half_a_circle_costs_nothing_in_the_regression() -> None:
    """The direction is learnt apart."""
    wanted = torch.tensor([[8.0, -8.0, 10.0, 1, 2, 3, 0.4, 0, 0]])
    predicted = wanted.clone()
    predicted[:, :2] /= 8  # offsets count in strides
    predicted[:, 6] += math.pi
    assert float(box_loss(predicted, wanted, torch.tensor([8.0]))) == pytest.approx(0.0, abs=1e-6)
