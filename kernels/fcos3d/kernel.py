"""Triton kernel of FCOS3D's targets: one program per block of points of an image."""

from __future__ import annotations

import triton
import triton.language as tl

from steptune.kernels.fcos3d.reference import CENTERNESS_ALPHA as _ALPHA
from steptune.kernels.fcos3d.reference import DIAGONAL as _DIAGONAL
from steptune.kernels.fcos3d.reference import FAR as _FAR
from steptune.kernels.fcos3d.reference import RADIUS as _RADIUS

SLOPE, FAR, RADIUS = tl.constexpr(-_ALPHA), tl.constexpr(_FAR), tl.constexpr(_RADIUS)
WIDTH = tl.constexpr(_DIAGONAL)
PI = tl.constexpr(3.141592653589793)
TINY = tl.constexpr(1e-37)


@triton.jit
def _atan2(y, x):
    """Return the angle of (x, y) with an error of at most 5e-7; Triton's interpreter has no atan2. The coefficients are
    those of `atanf` in Cephes.
    """
    wide = tl.maximum(tl.abs(x), tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
    narrow = tl.minimum(tl.abs(x), tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
    ratio = narrow / tl.maximum(wide, TINY)
    is_beyond = ratio > 0.41421356  # tan(pi / 8): from there on by the angle to pi / 4
    a = tl.where(is_beyond, (ratio - 1.0) / (ratio + 1.0), ratio)
    z = a * a
    angle = (((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1) * z * a + a
    angle += tl.where(is_beyond, PI / 4, 0.0)
    angle = tl.where(tl.abs(y) > tl.abs(x), PI / 2 - angle, angle)
    angle = tl.where(x < 0, PI - angle, angle)
    return tl.where(y < 0, -angle, angle)


@triton.jit
def fcos3d_targets(
    xy,
    strides,
    lows,
    highs,
    corners,
    labels,
    attributes,
    centres,
    depths,
    boxes,
    found_labels,
    found_attributes,
    found_distances,
    found_boxes,
    found_centerness,
    num_points,
    num_boxes,
    num_classes,
    num_attributes,
    BLOCK_P: tl.constexpr,
    BOXES: tl.constexpr,
):
    """Write the targets of a block of points, one thread per point; each thread visits the boxes one after another."""
    image = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_there = p < num_points
    x = tl.load(xy + p * 2, mask=is_there, other=0.0)
    y = tl.load(xy + p * 2 + 1, mask=is_there, other=0.0)
    stride = tl.load(strides + p, mask=is_there, other=1.0)
    low = tl.load(lows + p, mask=is_there, other=0.0)
    high = tl.load(highs + p, mask=is_there, other=0.0)

    first = image * num_boxes
    least = tl.full((BLOCK_P,), float("inf"), dtype=tl.float32)
    nearest = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for g in tl.range(0, BOXES, loop_unroll_factor=4):
        is_place = g < num_boxes
        is_box = tl.load(labels + first + g, mask=is_place, other=-1) >= 0  # no condition of a load: none waits for one
        corner = corners + (first + g) * 4
        left = x - tl.load(corner, mask=is_place, other=0.0)
        top = y - tl.load(corner + 1, mask=is_place, other=0.0)
        right = tl.load(corner + 2, mask=is_place, other=0.0) - x
        bottom = tl.load(corner + 3, mask=is_place, other=0.0) - y
        extent = tl.maximum(tl.maximum(left, top), tl.maximum(right, bottom))
        dx = x - tl.load(centres + (first + g) * 2, mask=is_place, other=0.0)
        dy = y - tl.load(centres + (first + g) * 2 + 1, mask=is_place, other=0.0)
        near = stride * RADIUS - tl.maximum(tl.abs(dx), tl.abs(dy)) > 0
        learns = near & (extent >= low) & (extent <= high)
        distance = tl.where(learns, tl.sqrt(dx * dx + dy * dy), FAR)
        is_nearer = is_box & (distance < least)  # of equal ones the first stays
        least = tl.where(is_nearer, distance, least)
        nearest = tl.where(is_nearer, g, nearest)

    has_box = is_there & (least <= FAR)  # even where none fits, as long as the image has one
    is_object = least < FAR
    own = first + nearest
    # All that is read comes before all that is written: a load behind a store waits for it.
    label = tl.load(labels + own, mask=has_box & is_object, other=0)
    attribute = tl.load(attributes + own, mask=has_box & is_object, other=0)
    x1 = tl.load(corners + own * 4, mask=has_box, other=0.0)
    y1 = tl.load(corners + own * 4 + 1, mask=has_box, other=0.0)
    x2 = tl.load(corners + own * 4 + 2, mask=has_box, other=0.0)
    y2 = tl.load(corners + own * 4 + 3, mask=has_box, other=0.0)
    centre_x = tl.load(centres + own * 2, mask=has_box, other=0.0)
    centre_y = tl.load(centres + own * 2 + 1, mask=has_box, other=0.0)
    depth = tl.load(depths + own, mask=has_box, other=0.0)
    towards_x = tl.load(boxes + own * 9, mask=has_box, other=0.0)
    towards_z = tl.load(boxes + own * 9 + 2, mask=has_box, other=0.0)
    size_0 = tl.load(boxes + own * 9 + 3, mask=has_box, other=0.0)
    size_1 = tl.load(boxes + own * 9 + 4, mask=has_box, other=0.0)
    size_2 = tl.load(boxes + own * 9 + 5, mask=has_box, other=0.0)
    yaw = tl.load(boxes + own * 9 + 6, mask=has_box, other=0.0)
    velocity_0 = tl.load(boxes + own * 9 + 7, mask=has_box, other=0.0)
    velocity_1 = tl.load(boxes + own * 9 + 8, mask=has_box, other=0.0)

    out = image * num_points + p
    tl.store(found_labels + out, tl.where(is_object, label, num_classes), mask=is_there)
    tl.store(found_attributes + out, tl.where(is_object, attribute, num_attributes), mask=is_there)
    tl.store(found_distances + out * 4, tl.where(has_box, x - x1, 0.0), mask=is_there)
    tl.store(found_distances + out * 4 + 1, tl.where(has_box, y - y1, 0.0), mask=is_there)
    tl.store(found_distances + out * 4 + 2, tl.where(has_box, x2 - x, 0.0), mask=is_there)
    tl.store(found_distances + out * 4 + 3, tl.where(has_box, y2 - y, 0.0), mask=is_there)
    from_x = tl.where(has_box, x - centre_x, 0.0)
    from_y = tl.where(has_box, y - centre_y, 0.0)
    box = found_boxes + out * 9
    tl.store(box, from_x, mask=is_there)
    tl.store(box + 1, from_y, mask=is_there)
    tl.store(box + 2, depth, mask=is_there)
    tl.store(box + 3, size_0, mask=is_there)
    tl.store(box + 4, size_1, mask=is_there)
    tl.store(box + 5, size_2, mask=is_there)
    tl.store(box + 6, tl.where(has_box, yaw - _atan2(towards_x, towards_z), 0.0), mask=is_there)
    tl.store(box + 7, velocity_0, mask=is_there)
    tl.store(box + 8, velocity_1, mask=is_there)
    relative = tl.sqrt(from_x * from_x + from_y * from_y) / (WIDTH * stride * RADIUS)
    tl.store(found_centerness + out, tl.where(has_box, tl.exp(relative * SLOPE), 0.0), mask=is_there)
