"""All-reduce in two levels, as a communication hook of DDP.

    reduce-scatter inside the host --> all-reduce of each part between hosts --> all-gather inside the host

Between hosts a rank sends its part only, all ranks of a host at once, so that a byte crosses the slow network about
once for each host. A compression, where there is one, is used there only. Buckets follow one another beside the
backward pass (`Lane`).

Source: Jia et al. (2018), arXiv 1807.11205
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.training.compression.base import FlatCompression, average_dense
from steptune.tuner.training.wide_reduction import widened

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket

    from steptune.tuner.training.compression.lane import Lane
    from steptune.tuner.training.hosts import Levels


class Hierarchy:
    """
    Args:
        widens: Gradients of 16 bits are added up in FP32, unless they are compressed.

    Attributes:
        compression: What is used between hosts; None where numbers are sent as they are.
        num_reductions: Buckets reduced so far.
        num_widened: Of those, such of 16 bits that were reduced in FP32; what is compressed is not.
    """

    def __init__(
        self, levels: Levels, lane: Lane, compression: FlatCompression | None, *, widens: bool = False
    ) -> None:
        self.levels = levels
        self.compression = compression
        self.num_reductions = 0
        self.num_widened = 0
        self._lane = lane
        self._widens = widens and compression is None

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
        """Average a one-dimensional tensor over all ranks, in place."""
        wide = widened(flat) if self._widens else flat
        average_in_two_levels(wide, self.levels, self.compression, key)
        if wide is not flat:
            flat.copy_(wide)
            self.num_widened += 1


def average_in_two_levels(
    flat: torch.Tensor, levels: Levels, compression: FlatCompression | None = None, key: int = 0
) -> None:
    """
    Args:
        compression: What is used between hosts.
        key: As of `FlatCompression.average`.
    """
    import torch.distributed as dist

    whole = padded(flat, levels.ranks_per_host)
    part = whole.new_empty(whole.numel() // levels.ranks_per_host)
    reduce_scatter(part, whole, levels.inside)
    part.div_(levels.ranks_per_host)
    if compression is None:
        average_dense(part, levels.between)
    else:
        compression.average(part, levels.between, key)
    dist.all_gather_into_tensor(whole, part, group=levels.inside)
    if whole is not flat:
        flat.copy_(whole[: flat.numel()])


def padded(flat: torch.Tensor, num_parts: int) -> torch.Tensor:
    """The tensor itself where it can be cut into equal parts, else a longer copy."""
    rest = -flat.numel() % num_parts
    if not rest:
        return flat
    whole = flat.new_empty(flat.numel() + rest)
    whole[: flat.numel()].copy_(flat)
    whole[flat.numel() :].zero_()
    return whole


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """Sums over a group, of which each rank gets its part.

    Gloo's own reduces everything everywhere and then drops what is not wanted: twice the bytes, and a copy. There every
    rank sends each other its part, and adds up what it gets.
    """
    import torch
    import torch.distributed as dist

    if dist.get_backend(group) != "gloo":
        dist.reduce_scatter_tensor(part, whole, group=group)
        return
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole, group=group)
    torch.sum(received.view(-1, part.numel()), 0, out=part)
