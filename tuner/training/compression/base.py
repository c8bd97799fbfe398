"""Base of compressions: averages of gradients over the ranks that send fewer bytes than they have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.step_hook import StepHook

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket

    from steptune.tuner.training.compression.lane import Lane

FIRST_COMPRESSED = 2
"""Step from which buckets are compressed: DDP rearranges its buckets after the first one, so state by bucket begins
with the third.
"""


class Compression(StepHook, ABC):
    """One technique, with what it keeps from step to step.

    Attributes:
        method: Its name among the choices of `gradient_compression`.
        dense_bytes: What gradients took that were reduced so far.
        sent_bytes: What was sent in their place.
        dense_itemsize: Bytes of an element as it would be reduced, where that is not its own.
    """

    def __init__(self) -> None:
        self.dense_bytes = 0
        self.sent_bytes = 0
        self.num_steps = 0
        self.dense_itemsize: int | None = None

    @abstractmethod
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The bucket's gradients, averaged over all ranks."""

    def count(self, dense: torch.Tensor, sent_bytes: int) -> None:
        """
        Args:
            sent_bytes: Of an all-reduce that would load the links as much.
        """
        self.dense_bytes += dense.numel() * (self.dense_itemsize or dense.itemsize)
        self.sent_bytes += sent_bytes

    @property
    def factor(self) -> float:
        """Factor by which bytes are reduced; 1 before anything was reduced."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


class FlatCompression(Compression):
    """A technique that looks at a run of numbers, whatever tensors they belong to: it can average parts too."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane

    @abstractmethod
    def average(self, flat: torch.Tensor, group: Any, key: int) -> torch.Tensor:
        """Average a one-dimensional tensor over a group, in place.

        Args:
            key: The same tensor has the same one in every step.
        """

    def see(self, bucket: GradBucket) -> None:
        """Take note of a bucket, or a part of it, before it is averaged."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.see(bucket)

        def run() -> torch.Tensor:
            averaged = self.average(bucket.buffer(), self._lane.group, bucket.index())
            self.num_steps += bucket.is_last()
            return averaged

        return self._lane.submit(run)


def average_dense(flat: torch.Tensor, group: Any) -> torch.Tensor:
    """Plain averaging, in place, with the rounding that DDP has."""
    import torch.distributed as dist

    flat.div_(dist.get_world_size(group))
    dist.all_reduce(flat, group=group)
    return flat
