"""All-reduce in two levels, as a communication hook of DDP.

    reduce-scatter inside the host --> all-reduce of each part between hosts --> all-gather inside the host

Between hosts a rank sends its part only, all ranks of a host at once, so that a byte crosses the slow network about
once for each host. A compression, where there is one, is used there only. Buckets follow one another beside the
backward pass (`Lane`).

Source: Jia et al. (2018), arXiv 1807.11205
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.training.compression.base import FlatCompression, average_dense

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket

    from tuner.training.compression.lane import Lane
    from tuner.training.hosts import Levels


class Hierarchy:
    """
    Attributes:
        compression: What is used between hosts; None where numbers are sent as they are.
        num_reductions: Buckets reduced so far.
    """

    def __init__(self, levels: Levels, lane: Lane, compression: FlatCompression | None) -> None:
        self.levels = levels
        self.compression = compression
        self.num_reductions = 0
        self._lane = lane

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.compression is not None:
            self.compression.see(bucket)
        return self._lane.submit(lambda: self._reduced(bucket))

    def _reduced(self, bucket: GradBucket) -> torch.Tensor:
        flat = bucket.buffer()
        self.average(flat, bucket.index())
        self.num_reductions += 1
        if self.compression is not None:
            self.compression.num_steps += bucket.is_last()
        return flat

    def average(self, flat: torch.Tensor, key: int) -> None:
        """Averages a one-dimensional tensor over all ranks, in place."""
        average_in_two_levels(flat, self.levels, self.compression, key)


def average_in_two_levels(
    flat: torch.Tensor, levels: Levels, compression: FlatCompression | None = None, key: int = 0
) -> None:
    """
    Args:
        compression: What is used between hosts.
        key: As of `FlatCompression.average`.
    """
    import torch.distributed as dist

    part_size = -(-flat.numel() // levels.ranks_per_host)
    padded = flat.new_zeros(part_size * levels.ranks_per_host)
    padded[: flat.numel()].copy_(flat)
    part = padded.new_empty(part_size)
    dist.reduce_scatter_tensor(part, padded, group=levels.inside)
    part.div_(levels.ranks_per_host)
    if compression is None:
        average_dense(part, levels.between)
    else:
        compression.average(part, levels.between, key)
    dist.all_gather_into_tensor(padded, part, group=levels.inside)
    flat.copy_(padded[: flat.numel()])
