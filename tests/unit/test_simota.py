"""SimOTA's assignment, against YOLOv7's rules written out box by box in plain Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steptune.tuner.workloads.zoo.detector import STRIDES, boxes_of, detection_loss
from steptune.tuner.workloads.zoo.simota import Boxes, Matches, assign, complete_overlap, find_candidates, match

ANCHORS = torch.tensor(
    [[[8.0, 10], [20, 12], [14, 30]], [[30.0, 40], [44, 20], [50, 60]], [[60.0, 40], [90, 80], [120, 70]]]
)
NUM_CLASSES = 3
SIZE = (64, 96)
"""Height and width: not square, where a mistake of one for the other shows."""

Found = set[tuple[int, int, int, int, int, int]]
"""Level, image, anchor, row, column, box."""


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[torch.Tensor], Boxes, int]:
    """Random predictions of a batch, and boxes of which an image may have none."""
    num_images = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    predictions = [
        torch.randn(num_images, 3, SIZE[0] // s, SIZE[1] // s, 5 + NUM_CLASSES, generator=generator) for s in STRIDES
    ]
    share = st.floats(0.03125, 0.96875, width=32)
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, num_images - 1), st.integers(0, NUM_CLASSES - 1), share, share, share, share),
            max_size=6,
        )
    )
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)
    return predictions, Boxes(table[:, 0].long(), table[:, 1].long(), table[:, 2:]), num_images


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def slow_candidates(boxes: Boxes, level: int) -> list[tuple[int, int, int, int, int]]:
    """Image, anchor, row, column and box, as `find_3_positive` says; one entry for each box that is near."""
    stride = STRIDES[level]
    height, width = SIZE[0] // stride, SIZE[1] // stride
    found = []
    for box, (image, shares) in enumerate(zip(boxes.image.tolist(), boxes.xywh, strict=True)):
        x, y, w, h = (float(v) for v in shares * torch.tensor([width, height, width, height]))
        for anchor in range(3):
            aw, ah = (float(v) for v in ANCHORS[level, anchor] / stride)
            if max(w / aw, aw / w, h / ah, ah / h) >= 4:
                continue
            cells = [(x, y)]
            if x % 1 < 0.5 and x > 1:
                cells.append((x - 0.5, y))
            if y % 1 < 0.5 and y > 1:
                cells.append((x, y - 0.5))
            if (width - x) % 1 < 0.5 and width - x > 1:
                cells.append((x + 0.5, y))
            if (height - y) % 1 < 0.5 and height - y > 1:
                cells.append((x, y + 0.5))
            for cx, cy in cells:
                row, column = min(max(int(cy), 0), height - 1), min(max(int(cx), 0), width - 1)
                found.append((image, anchor, row, column, box))
    return found


def slow_overlap(first: list[float], second: list[float]) -> float:
    shared = 1.0
    for axis in (0, 1):
        low = max(first[axis] - first[axis + 2] / 2, second[axis] - second[axis + 2] / 2)
        high = min(first[axis] + first[axis + 2] / 2, second[axis] + second[axis + 2] / 2)
        shared *= max(0.0, high - low)
    return shared / (first[2] * first[3] + second[2] * second[3] - shared)


def slow_cost(raw: list[float], label: int, overlap: float) -> float:
    """Cross-entropy against the one-hot class, and three times the negative logarithm of the overlap."""
    total = 0.0
    for number, logit in enumerate(raw[5:]):
        p = math.sqrt(sigmoid(logit) * sigmoid(raw[4]))
        total -= math.log(p) if number == label else math.log(1 - p)
    return total - 3 * math.log(overlap + 1e-8)


def slow_assign(predictions: list[torch.Tensor], boxes: Boxes, num_images: int) -> tuple[Found, bool]:
    """The matches, and whether the decision was close: equal costs, or overlaps that add up to a whole number."""
    found: Found = set()
    close = False
    candidates = [(level, *c) for level in range(3) for c in slow_candidates(boxes, level)]
    for image in range(num_images):
        here = [c for c in candidates if c[1] == image]
        numbers = [n for n, i in enumerate(boxes.image.tolist()) if i == image]
        overlaps: dict[int, list[float]] = {n: [] for n in numbers}
        costs: dict[int, list[float]] = {n: [] for n in numbers}
        for level, _, anchor, row, column, _ in here:
            raw = predictions[level][image, anchor, row, column].double().tolist()
            stride = STRIDES[level]
            decoded = [
                (2 * sigmoid(raw[0]) - 0.5 + column) * stride,
                (2 * sigmoid(raw[1]) - 0.5 + row) * stride,
                (2 * sigmoid(raw[2])) ** 2 * float(ANCHORS[level, anchor, 0]),
                (2 * sigmoid(raw[3])) ** 2 * float(ANCHORS[level, anchor, 1]),
            ]
            for n in numbers:
                box = [float(v) for v in boxes.xywh[n].double() * torch.tensor([SIZE[1], SIZE[0], SIZE[1], SIZE[0]])]
                overlaps[n].append(slow_overlap(box, decoded))
                costs[n].append(slow_cost(raw, int(boxes.label[n]), overlaps[n][-1]))
        takers: dict[int, list[int]] = {}
        for n in numbers if here else []:
            total = sum(sorted(overlaps[n], reverse=True)[:10])
            close |= abs(total - round(total)) < 1e-3
            count = max(1, int(total))
            ranked = sorted(range(len(here)), key=lambda m: costs[n][m])
            close |= any(abs(costs[n][a] - costs[n][b]) < 1e-4 for a, b in itertools.pairwise(ranked))
            for m in ranked[:count]:
                takers.setdefault(m, []).append(n)
        for m, wanting in takers.items():
            ranked = sorted(numbers, key=lambda n: costs[n][m])
            if len(wanting) > 1 and len(ranked) > 1:
                close |= abs(costs[ranked[0]][m] - costs[ranked[1]][m]) < 1e-4
            level, _, anchor, row, column, _ = here[m]
            found.add((level, image, anchor, row, column, ranked[0] if len(wanting) > 1 else wanting[0]))
    return found, close


def as_set(matches: list[Matches]) -> Found:
    found: Found = set()
    for level, m in enumerate(matches):
        at = m.places
        columns = (at.image, at.anchor, at.row, at.column, m.box)
        found |= {(level, *row) for row in zip(*(c.tolist() for c in columns), strict=True)}
    return found


@given(cases())
@settings(max_examples=60, deadline=None)
def test_candidates_are_the_cells_near_boxes_that_fit_an_anchor(case: tuple[list[torch.Tensor], Boxes, int]) -> None:
    _, boxes, _ = case
    for level, stride in enumerate(STRIDES):
        found = find_candidates(boxes, ANCHORS[level] / stride, SIZE[0] // stride, SIZE[1] // stride)
        columns = (found.image, found.anchor, found.row, found.column)
        rows = sorted(zip(*(c.tolist() for c in columns), strict=True))
        assert rows == sorted(row[:4] for row in slow_candidates(boxes, level))


@given(cases())
@settings(max_examples=60, deadline=None)
def test_assignment_is_that_of_the_rules(case: tuple[list[torch.Tensor], Boxes, int]) -> None:
    """But where two costs are equal, or overlaps add up to a whole number, within rounding."""
    predictions, boxes, num_images = case
    expected, close = slow_assign(predictions, boxes, num_images)
    found = as_set(assign(predictions, boxes, ANCHORS, STRIDES, num_images))
    if not close:
        assert found == expected


def test_a_candidate_wanted_by_two_boxes_goes_to_the_cheapest_of_all() -> None:
    """Cheapest of all boxes of the image, not only of those that took it: here the third, which did not."""
    cost = torch.tensor([[3.0, 9.0, 9.0], [2.0, 9.0, 9.0], [1.0, 0.5, 9.0]])
    overlap = torch.full((3, 3), 0.2)  # each box takes one
    assert match(cost, overlap).tolist() == [2, 2, -1]


def test_a_box_takes_as_many_as_its_best_ten_overlaps_add_up_to() -> None:
    overlap = torch.full((1, 20), 0.25)
    assert int((match(torch.arange(20.0)[None], overlap) >= 0).sum()) == 2


@pytest.mark.parametrize("num_boxes", [0, 1])
def test_images_without_boxes_train_too(num_boxes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    predictions = [torch.randn(2, 3, 64 // s, 64 // s, 8, generator=generator).requires_grad_() for s in STRIDES]
    labels = torch.full((2, 3), -1)
    labels[1, :num_boxes] = 2
    boxes = boxes_of(torch.full((2, 3, 4), 0.5), labels)
    assert len(boxes.label) == num_boxes
    loss = detection_loss(predictions, boxes, 64)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in predictions)


def test_extreme_scores_give_no_nan() -> None:
    """A probability that rounds to 1 would be infinity less infinity in logits."""
    predictions = [torch.full((1, 3, 64 // s, 64 // s, 8), 40.0) for s in STRIDES]
    boxes = Boxes(torch.tensor([0]), torch.tensor([1]), torch.tensor([[0.5, 0.5, 0.3, 0.3]]))
    anchors = ANCHORS
    matches = assign(predictions, boxes, anchors, STRIDES, 1)
    assert sum(len(m.box) for m in matches) >= 1
    assert detection_loss(predictions, boxes, 64).isfinite()


def test_complete_overlap_of_equal_boxes_is_one_and_of_distant_ones_negative() -> None:
    box = torch.tensor([[5.0, 5, 2, 4]])
    assert float(complete_overlap(box, box)) == pytest.approx(1.0, abs=1e-6)
    far = torch.tensor([[50.0, 5, 2, 4]])
    expected = -(45**2) / (47**2 + 4**2)  # no overlap, no difference of shape: less the distance over the hull
    assert float(complete_overlap(far, box)) == pytest.approx(expected, rel=1e-5)
    wide = torch.tensor([[5.0, 5, 4, 2]])
    iou = 4 / 12
    shape = 4 / math.pi**2 * (math.atan(0.5) - math.atan(2.0)) ** 2
    assert float(complete_overlap(wide, box)) == pytest.approx(iou - shape**2 / (1 - iou + shape), rel=1e-4)
