"""Triton kernel of FCOS3D's targets: one program a block of points of an image."""

from __future__ import annotations

import triton
import triton.language as tl

from steptune.kernels.fcos3d.reference import CENTERNESS_ALPHA as _ALPHA
from steptune.kernels.fcos3d.reference import DIAGONAL as _DIAGONAL
from steptune.kernels.fcos3d.reference import FAR as _FAR
from steptune.kernels.fcos3d.reference import RADIUS as _RADIUS

SLOPE, FAR, RADIUS = tl.constexpr(-_ALPHA), tl.constexpr(_FAR), tl.constexpr(_RADIUS)
WIDTH = tl.constexpr(_DIAGONAL)


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
    yaws,
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
    BLOCK_G: tl.constexpr,
):
    """Write the targets of a block of points; the pairs of points and boxes stay in registers."""
    image = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_there = p < num_points
    x = tl.load(xy + p * 2, mask=is_there, other=0.0)
    y = tl.load(xy + p * 2 + 1, mask=is_there, other=0.0)
    stride = tl.load(strides + p, mask=is_there, other=1.0)
    low = tl.load(lows + p, mask=is_there, other=0.0)
    high = tl.load(highs + p, mask=is_there, other=0.0)

    g = tl.arange(0, BLOCK_G)
    first = image * num_boxes
    is_box = tl.load(labels + first + g, mask=g < num_boxes, other=-1) >= 0
    corner = corners + (first + g) * 4
    left = x[:, None] - tl.load(corner, mask=is_box, other=0.0)[None, :]
    top = y[:, None] - tl.load(corner + 1, mask=is_box, other=0.0)[None, :]
    right = tl.load(corner + 2, mask=is_box, other=0.0)[None, :] - x[:, None]
    bottom = tl.load(corner + 3, mask=is_box, other=0.0)[None, :] - y[:, None]
    extent = tl.maximum(tl.maximum(left, top), tl.maximum(right, bottom))
    dx = x[:, None] - tl.load(centres + (first + g) * 2, mask=is_box, other=0.0)[None, :]
    dy = y[:, None] - tl.load(centres + (first + g) * 2 + 1, mask=is_box, other=0.0)[None, :]
    near = (stride * RADIUS)[:, None] - tl.maximum(tl.abs(dx), tl.abs(dy)) > 0
    learns = near & (extent >= low[:, None]) & (extent <= high[:, None])
    distance = tl.where(learns, tl.sqrt(dx * dx + dy * dy), FAR)
    distance = tl.where(is_box[None, :], distance, float("inf"))
    least, nearest = tl.min(distance, 1, return_indices=True, return_indices_tie_break_left=True)

    has_box = is_there & (least <= FAR)  # even where none fits, as long as the image has one
    is_object = least < FAR
    own = first + nearest
    label = tl.load(labels + own, mask=has_box & is_object, other=0)
    attribute = tl.load(attributes + own, mask=has_box & is_object, other=0)
    out = image * num_points + p
    tl.store(found_labels + out, tl.where(is_object, label, num_classes), mask=is_there)
    tl.store(found_attributes + out, tl.where(is_object, attribute, num_attributes), mask=is_there)

    x1 = tl.load(corners + own * 4, mask=has_box, other=0.0)
    y1 = tl.load(corners + own * 4 + 1, mask=has_box, other=0.0)
    x2 = tl.load(corners + own * 4 + 2, mask=has_box, other=0.0)
    y2 = tl.load(corners + own * 4 + 3, mask=has_box, other=0.0)
    tl.store(found_distances + out * 4, tl.where(has_box, x - x1, 0.0), mask=is_there)
    tl.store(found_distances + out * 4 + 1, tl.where(has_box, y - y1, 0.0), mask=is_there)
    tl.store(found_distances + out * 4 + 2, tl.where(has_box, x2 - x, 0.0), mask=is_there)
    tl.store(found_distances + out * 4 + 3, tl.where(has_box, y2 - y, 0.0), mask=is_there)

    from_x = tl.where(has_box, x - tl.load(centres + own * 2, mask=has_box, other=0.0), 0.0)
    from_y = tl.where(has_box, y - tl.load(centres + own * 2 + 1, mask=has_box, other=0.0), 0.0)
    tl.store(found_boxes + out * 9, from_x, mask=is_there)
    tl.store(found_boxes + out * 9 + 1, from_y, mask=is_there)
    tl.store(found_boxes + out * 9 + 2, tl.load(depths + own, mask=has_box, other=0.0), mask=is_there)
    for part in tl.static_range(3, 6):
        size = tl.load(boxes + own * 9 + part, mask=has_box, other=0.0)
        tl.store(found_boxes + out * 9 + part, size, mask=is_there)
    tl.store(found_boxes + out * 9 + 6, tl.load(yaws + own, mask=has_box, other=0.0), mask=is_there)
    for part in tl.static_range(7, 9):
        velocity = tl.load(boxes + own * 9 + part, mask=has_box, other=0.0)
        tl.store(found_boxes + out * 9 + part, velocity, mask=is_there)
    relative = tl.sqrt(from_x * from_x + from_y * from_y) / (WIDTH * stride * RADIUS)
    tl.store(found_centerness + out, tl.where(has_box, tl.exp(relative * SLOPE), 0.0), mask=is_there)
