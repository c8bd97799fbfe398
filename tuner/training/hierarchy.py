"""All-reduce in two levels, as a communication hook of DDP.

    reduce-scatter inside the host --> all-reduce of each part between hosts --> all-gather inside the host

Between hosts a rank sends its part only, all ranks of a host at once, so that a byte crosses the slow network about
once for each host. Compression, if any, is used only between hosts. Buckets follow one another beside the
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
    """Hook that reduces gradients in two levels: inside each host, then between hosts.

    Args:
        widens: Whether 16-bit gradients are summed in FP32, unless they are compressed.

    Attributes:
        compression: Compression between hosts; None where numbers are sent uncompressed.
        num_reductions: Buckets reduced so far.
        num_widened: Number of 16-bit buckets among them that were reduced in FP32; compressed ones do not count.
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
    """Average a one-dimensional tensor over all ranks in two levels, in place.

    Args:
        compression: Compression between hosts; None sends numbers uncompressed.
        key: As in `FlatCompression.average`.
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
    """Return the tensor itself if it divides into equal parts, else a copy padded with zeros."""
    rest = -flat.numel() % num_parts
    if not rest:
        return flat
    whole = flat.new_empty(flat.numel() + rest)
    whole[: flat.numel()].copy_(flat)
    whole[flat.numel() :].zero_()
    return whole


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """Sum `whole` over a group and write this rank's part of the sum to `part`.

    Gloo's own reduce-scatter reduces everything on every rank and drops the rest: twice the bytes, and a copy. With
    gloo every rank therefore sends each other rank its part, and sums what it receives.
    """
    import torch
    import torch.distributed as dist

    if dist.get_backend(group) != "gloo":
        dist.reduce_scatter_tensor(part, whole, group=group)
        return
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole, group=group)
    torch.sum(received.view(-1, part.numel()), 0, out=part)
