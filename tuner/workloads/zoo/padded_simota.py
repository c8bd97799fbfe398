"""Candidates of YOLOv7's SimOTA on tensors of a fixed size, so that the host never waits for the device.

Each box has places for all cells, anchors and levels that it could have as candidates, of which those count that
`simota.find_candidates` finds, in its order.

Shapes: B images, G boxes of an image, A anchors of a cell, M = 5 A G candidates, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steptune.tuner.workloads.zoo.simota import ANCHOR_RATIO, NEIGHBOUR


@dataclass(frozen=True)
class Candidates:
    """SimOTA's candidate anchors on one feature-map level, padded to a fixed number per image.

    Attributes:
        place: (B, M), indices among the predictions of an image.
        counts: (B, M), whether the entry is a candidate.
        raw: (B, M, 5 + K), predictions before the sigmoid.
        boxes: (B, M, 4), predicted centre and size in cells.
        cells: Rows and columns of the level.
    """

    place: torch.Tensor
    counts: torch.Tensor
    raw: torch.Tensor
    boxes: torch.Tensor
    cells: tuple[int, int]


def find_all(predictions: torch.Tensor, xywh: torch.Tensor, labels: torch.Tensor, anchors: torch.Tensor) -> Candidates:
    """Return all possible candidates of a level, with a mask of the actual ones.

    Args:
        predictions: Predictions of the level, (B, A, H, W, 5 + K).
        xywh: (B, G, 4), centre and size as shares of the image.
        labels: (B, G), negative where there is no box.
        anchors: (A, 2), widths and heights in cells.
    """
    batch, num_anchors, height, width, _ = predictions.shape
    scale = filled(xywh, (width, height))
    centre, size = xywh[..., :2] * scale, xywh[..., 2:] * scale
    ratio = size[:, None] / anchors[:, None]
    fits = (torch.maximum(ratio, 1 / ratio).amax(3) < ANCHOR_RATIO) & (labels >= 0)[:, None]
    left, top = ((centre % 1 < NEIGHBOUR) & (centre > 1)).unbind(2)
    right, bottom = (((scale - centre) % 1 < NEIGHBOUR) & (scale - centre > 1)).unbind(2)
    near = torch.stack([torch.ones_like(left), left, top, right, bottom], 1)
    steps = filled(xywh, (0, 0, 1, 0, 0, 1, -1, 0, 0, -1)).view(5, 2) * NEIGHBOUR
    column, row = (centre[:, None] - steps[:, None]).long().unbind(3)
    row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    anchor = torch.arange(num_anchors, device=xywh.device)[:, None]
    place = ((anchor * height + row[:, :, None]) * width + column[:, :, None]).flatten(1)
    raw = predictions.flatten(1, 3).take_along_dim(place[..., None], 1)
    cell = torch.stack([column, row], 3)[:, :, None].expand(-1, -1, num_anchors, -1, -1).flatten(1, 3)
    middle = raw[..., :2].sigmoid() * 2 - 0.5 + cell
    extent = (raw[..., 2:4].sigmoid() * 2) ** 2 * anchors[:, None].expand(batch, 5, -1, labels.shape[1], -1).flatten(
        1, 3
    )
    return Candidates(
        place=place,
        counts=(near[:, :, None] & fits[:, None]).flatten(1),
        raw=raw,
        boxes=torch.cat([middle, extent], -1),
        cells=(height, width),
    )


def filled(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """Return numbers as a vector with the dtype and device of `like`. They are written on the device: a copy from the
    host would wait for it, and no CUDA graph can record one.
    """
    return torch.cat([like.new_full((1,), value) for value in values])
