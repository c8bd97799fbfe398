"""Coordinate compaction in plain PyTorch: for each point, the values of the one box assigned to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def compact(pairs: Sequence[Tensor], chosen: Tensor) -> list[Tensor]:
    """Select, for each point, the values of its chosen box.

    mmdetection3d indexes with a Python `range`, which becomes a list, a tensor on the host and a copy in every call;
    here the index is made on the device.

    Args:
        pairs: Values for each pair of a point and a box, each tensor (P, G, parts).
        chosen: (P), the box of each point.
    """
    each = torch.arange(len(chosen), device=chosen.device)
    return [pair[each, chosen] for pair in pairs]
