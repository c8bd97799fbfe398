"""Triton kernels of SimOTA for a whole batch: the first sums over classes for each candidate, the second lets each box
take candidates, and the third resolves candidates taken by several boxes.

Shape suffixes: m candidates and g boxes of an image, k classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-8)
MOST = tl.constexpr(100.0)
"""Maximum of a binary cross-entropy term, as in torch."""
OUTSIDE = tl.constexpr(1e5)
NEVER = tl.constexpr(float("inf"))


@triton.jit
def _entropy_of_wrong(probability):
    """Return -log(1 - p), with a logarithm that is exact for small p."""
    rest = 1.0 - probability
    # log1p(-p) = log(rest) * -p / (rest - 1): the rounding of `rest` cancels (Kahan).
    exact = tl.where(rest == 1.0, probability, tl.log(tl.where(rest > 0, rest, 1.0)) * probability / (rest - 1.0))
    return tl.where(rest > 0, tl.minimum(exact, MOST), MOST)


@triton.jit
def _entropy_of_right(probability):
    """Return -log(p)."""
    return tl.where(probability > 0, tl.minimum(-tl.log(tl.where(probability > 0, probability, 1.0)), MOST), MOST)


@triton.jit
def _places(x, y, reach, left, top, right, bottom):
    """Return two masks: the priors inside a box, and the priors near its centre."""
    in_box = (x > left) & (y > top) & (x < right) & (y < bottom)
    across = tl.abs(x - (left + right) / 2)
    down = tl.abs(y - (top + bottom) / 2)
    return in_box, (across < reach) & (down < reach)


@triton.jit
def simota_candidates(
    objectness,
    classes,
    wanted,
    labels,
    valid,
    priors,
    radius,
    sums,
    counts,
    num_candidates,
    num_boxes,
    num_classes,
    objectness_image,
    objectness_candidate,
    classes_image,
    classes_candidate,
    classes_class,
    HAS_VALID: tl.constexpr,
    HAS_PRIORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CLASS_BLOCKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Write two values for each candidate (B, M): its cross-entropy if every class were wrong, and whether it is
    eligible.
    """
    image = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_there = m < num_candidates
    raw = tl.load(objectness + image * objectness_image + m * objectness_candidate, mask=is_there, other=0.0)
    is_object = tl.sigmoid(raw.to(tl.float32))
    total = tl.zeros([BLOCK_M], tl.float32)
    for block in tl.static_range(CLASS_BLOCKS):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = is_there[:, None] & (k < num_classes)[None, :]
        at = classes + image * classes_image + m[:, None] * classes_candidate + k[None, :] * classes_class
        found = tl.sigmoid(tl.load(at, mask=inside, other=0.0).to(tl.float32))
        entropy = _entropy_of_wrong(tl.sqrt(found * is_object[:, None]))
        total += tl.sum(tl.where(inside, entropy, 0.0), 1)
    counted = is_there
    if HAS_VALID:
        counted = counted & (tl.load(valid + image * num_candidates + m, mask=is_there, other=0) > 0)
    if HAS_PRIORS:
        g = tl.arange(0, BLOCK_G)
        is_box = tl.load(labels + image * num_boxes + g, mask=g < num_boxes, other=-1) >= 0
        side = wanted + (image * num_boxes + g) * 4
        left = tl.load(side, mask=is_box, other=0.0)[None, :]
        top = tl.load(side + 1, mask=is_box, other=0.0)[None, :]
        right = tl.load(side + 2, mask=is_box, other=0.0)[None, :]
        bottom = tl.load(side + 3, mask=is_box, other=0.0)[None, :]
        x = tl.load(priors + m * 3, mask=is_there, other=0.0)[:, None]
        y = tl.load(priors + m * 3 + 1, mask=is_there, other=0.0)[:, None]
        reach = tl.load(priors + m * 3 + 2, mask=is_there, other=0.0)[:, None] * radius
        in_box, in_centre = _places(x, y, reach, left, top, right, bottom)
        near = (in_box | in_centre) & is_box[None, :]
        counted = counted & (tl.max(near.to(tl.int32), 1) > 0)
    tl.store(sums + image * num_candidates + m, total, mask=is_there)
    tl.store(counts + image * num_candidates + m, counted.to(tl.int8), mask=is_there)


@triton.jit
def simota_choices(
    boxes,
    objectness,
    classes,
    wanted,
    labels,
    priors,
    radius,
    sums,
    counts,
    costs,
    taken,
    num_candidates,
    num_boxes,
    boxes_image,
    boxes_candidate,
    boxes_side,
    objectness_image,
    objectness_candidate,
    classes_image,
    classes_candidate,
    classes_class,
    overlap_weight,
    HAS_PRIORS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write, for one box, the cost of each candidate and whether the box takes the candidate (B, G, M)."""
    g = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    box = image * num_boxes + g
    label = tl.load(labels + box)
    m = tl.arange(0, BLOCK_M)
    is_there = m < num_candidates
    row = box * num_candidates + m
    if label < 0:
        tl.store(costs + row, tl.full([BLOCK_M], NEVER, tl.float32), mask=is_there)
        tl.store(taken + row, tl.zeros([BLOCK_M], tl.int8), mask=is_there)
        return
    own = image * num_candidates + m
    counted = tl.load(counts + own, mask=is_there, other=0) > 0
    left = tl.load(wanted + box * 4)
    top = tl.load(wanted + box * 4 + 1)
    right = tl.load(wanted + box * 4 + 2)
    bottom = tl.load(wanted + box * 4 + 3)
    corner = boxes + image * boxes_image + m * boxes_candidate
    its_left = tl.load(corner, mask=counted, other=0.0).to(tl.float32)
    its_top = tl.load(corner + boxes_side, mask=counted, other=0.0).to(tl.float32)
    its_right = tl.load(corner + 2 * boxes_side, mask=counted, other=0.0).to(tl.float32)
    its_bottom = tl.load(corner + 3 * boxes_side, mask=counted, other=0.0).to(tl.float32)
    width = tl.maximum(tl.minimum(right, its_right) - tl.maximum(left, its_left), 0.0)
    height = tl.maximum(tl.minimum(bottom, its_bottom) - tl.maximum(top, its_top), 0.0)
    shared = width * height
    union = (right - left) * (bottom - top) + (its_right - its_left) * (its_bottom - its_top) - shared
    overlap = tl.where(counted, shared / tl.where(counted, union, 1.0), 0.0)

    its_class = classes + image * classes_image + m * classes_candidate + label * classes_class
    its_object = objectness + image * objectness_image + m * objectness_candidate
    probability = tl.sqrt(
        tl.sigmoid(tl.load(its_class, mask=counted, other=0.0).to(tl.float32))
        * tl.sigmoid(tl.load(its_object, mask=counted, other=0.0).to(tl.float32))
    )
    cost = tl.load(sums + own, mask=counted, other=0.0) - _entropy_of_wrong(probability)
    cost += _entropy_of_right(probability) - overlap_weight * tl.log(overlap + EPSILON)
    if HAS_PRIORS:
        x = tl.load(priors + m * 3, mask=is_there, other=0.0)
        y = tl.load(priors + m * 3 + 1, mask=is_there, other=0.0)
        reach = tl.load(priors + m * 3 + 2, mask=is_there, other=0.0) * radius
        in_box, in_centre = _places(x, y, reach, left, top, right, bottom)
        cost += tl.where(in_box & in_centre, 0.0, OUTSIDE)
    cost = tl.where(counted, cost, NEVER)
    tl.store(costs + row, cost, mask=is_there)

    largest = 0.0
    rest = overlap
    for _ in tl.static_range(TOP):
        best, at = tl.max(rest, 0, return_indices=True, return_indices_tie_break_left=True)
        largest += best
        rest = tl.where(m == at, 0.0, rest)
    count = tl.maximum(largest.to(tl.int32), 1)
    rest = cost
    is_taken = tl.zeros([BLOCK_M], tl.int32)
    for number in tl.static_range(TOP):
        least, at = tl.min(rest, 0, return_indices=True, return_indices_tie_break_left=True)
        takes = (number < count) & (least < NEVER)
        is_taken = tl.where((m == at) & takes, 1, is_taken)
        rest = tl.where(m == at, NEVER, rest)
    tl.store(taken + row, is_taken.to(tl.int8), mask=is_there)


@triton.jit
def simota_conflicts(costs, taken, found, num_candidates, num_boxes, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr):
    """Write the index of each candidate's box, or -1 for none, in shape (B, M). A candidate that several boxes took
    gets the cheapest of all boxes.
    """
    image = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    g = tl.arange(0, BLOCK_G)
    inside = (g < num_boxes)[:, None] & (m < num_candidates)[None, :]
    places = (image * num_boxes + g[:, None]) * num_candidates + m[None, :]
    takes = tl.load(taken + places, mask=inside, other=0).to(tl.int32)
    cost = tl.load(costs + places, mask=inside, other=NEVER)
    times = tl.sum(takes, 0)
    _, cheapest = tl.min(cost, 0, return_indices=True, return_indices_tie_break_left=True)
    only = tl.sum(takes * g[:, None], 0)
    chosen = tl.where(times > 1, cheapest, only)
    result = tl.where(times > 0, chosen, -1)
    tl.store(found + image * num_candidates + m, result.to(tl.int64), mask=m < num_candidates)
