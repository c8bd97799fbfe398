"""Base classes of gradient compression, which averages gradients over ranks and sends fewer bytes than the gradients
contain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.step_hook import StepHook

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket

    from steptune.tuner.training.compression.lane import Lane

FIRST_COMPRESSED = 2
"""First step, counted from 0, whose buckets are compressed.

DDP rebuilds its buckets after the first step, so per-bucket state starts with the third.
"""


class Compression(StepHook, ABC):
    """A compression technique, with the state that it keeps from step to step.

    Attributes:
        method: Name in the strategy `gradient_compression`.
        dense_bytes: Uncompressed size of all gradients reduced so far.
        sent_bytes: Bytes sent in their place.
        dense_itemsize: Bytes per element of the uncompressed reduction; None where they are the element's own.
    """

    def __init__(self) -> None:
        self.dense_bytes = 0
        self.sent_bytes = 0
        self.num_steps = 0
        self.dense_itemsize: int | None = None

    @abstractmethod
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket's gradients over all ranks."""

    def count(self, dense: torch.Tensor, sent_bytes: int) -> None:
        """Count a reduction's uncompressed and sent bytes.

        Args:
            sent_bytes: Size of an all-reduce that would load the links equally.
        """
        self.dense_bytes += dense.numel() * (self.dense_itemsize or dense.itemsize)
        self.sent_bytes += sent_bytes

    @property
    def factor(self) -> float:
        """Factor by which the bytes sent are reduced; 1 before the first reduction."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0


class FlatCompression(Compression):
    """Compression of flat sequences of numbers, whatever tensors they belong to. It therefore also works on parts of a
    bucket.
    """

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane

    @abstractmethod
    def average(self, flat: torch.Tensor, group: Any, key: int) -> torch.Tensor:
        """Average a one-dimensional tensor over a group, in place.

        Args:
            key: Identifies the tensor; the same in every step.
        """

    def see(self, bucket: GradBucket) -> None:
        """Register a bucket, or a part of one, before it is averaged."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.see(bucket)

        def run() -> torch.Tensor:
            averaged = self.average(bucket.buffer(), self._lane.group, bucket.index())
            self.num_steps += bucket.is_last()
            return averaged

        return self._lane.submit(run)


def average_dense(flat: torch.Tensor, group: Any) -> torch.Tensor:
    """Average a tensor over a group, in place, without compression and with the same rounding as DDP."""
    import torch.distributed as dist

    flat.div_(dist.get_world_size(group))
    dist.all_reduce(flat, group=group)
    return flat
