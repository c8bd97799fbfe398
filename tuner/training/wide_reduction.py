"""FP32 sums in DDP's averaging of 16-bit gradients, so that O2 loses no more precision on several ranks than on one.

DDP by itself adds up gradients in their own format, so that the sum over many ranks loses what 16 bits do not hold.
Between two ranks it does not: their sum is rounded once, to the format that it is kept in, whatever adds it up.
Gradients that have 32 bits, as those of normalisation layers, are reduced as they are.

Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks, whose compressing hooks are the same with fewer bits
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket


class WideReduction:
    """Communication hook that sums 16-bit gradients in FP32.

    Attributes:
        num_widened: Number of 16-bit buckets reduced in FP32 so far.
    """

    def __init__(self, group: Any) -> None:
        self.num_widened = 0
        self._group = group

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        import torch.distributed as dist

        flat = bucket.buffer()
        wide = widened(flat)
        self.num_widened += wide is not flat
        wide.div_(dist.get_world_size(self._group))
        work: Any = dist.all_reduce(wide, group=self._group, async_op=True)
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: flat.copy_(done.value()[0]))


def is_needed(num_ranks: int, dtype: str) -> bool:
    """Say whether an average of 16-bit gradients depends on the dtype in which it is summed.

    Halves of two numbers are exact in bfloat16, which has the range of FP32, but not in float16 where they are tiny.
    """
    return num_ranks > 2 or dtype == "float16"


def widened(flat: torch.Tensor) -> torch.Tensor:
    """Return an FP32 copy of a 16-bit tensor; any other tensor unchanged."""
    return flat.float() if flat.element_size() == 2 else flat
