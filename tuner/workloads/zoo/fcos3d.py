"""Points at which the head of FCOS3D predicts. Their assignment to boxes is in `steptune.kernels.fcos3d`.

Source: open-mmlab/mmdetection3d, mmdet3d/models/dense_heads/fcos_mono3d_head.py; Wang et al., "FCOS3D"
(2021), arXiv 2104.10956.

Shapes: P points of all levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steptune.kernels.fcos3d import Points

REGRESS_RANGES = ((-1.0, 48.0), (48.0, 96.0), (96.0, 192.0), (192.0, 384.0), (384.0, 1e8))
"""Minimum and maximum extent, in pixels, of the boxes that each level learns."""


def make_points(sizes: Sequence[tuple[int, int]], strides: Sequence[int], device: torch.device) -> Points:
    """Return the centres of all cells of the feature maps, level by level, and row by row within a level.

    Args:
        sizes: Rows and columns of each level.
    """
    places, marks = [], []
    for (rows, columns), stride, extents in zip(sizes, strides, REGRESS_RANGES, strict=False):
        y = torch.arange(rows, device=device).float() * stride + stride // 2
        x = torch.arange(columns, device=device).float() * stride + stride // 2
        places.append(torch.stack([x.repeat(rows), y.repeat_interleave(columns)], dim=1))
        marks.append(torch.stack([torch.full_like(places[-1][:, 0], mark) for mark in (stride, *extents)], dim=1))
    return Points(torch.cat(places), *torch.cat(marks).unbind(dim=1))
