"""Gradient compression to float16 or bfloat16: half the bytes, summed in 16 bits.

Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks, which reduces whole buckets here
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.training.compression.base import FlatCompression, average_dense

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket

    from steptune.tuner.training.compression.lane import Lane


class SixteenBit(FlatCompression):
    def __init__(self, lane: Lane, method: str) -> None:
        super().__init__(lane)
        self.method = method

    def average(self, flat: torch.Tensor, group: Any, key: int) -> torch.Tensor:
        import torch

        self.count(flat, 2 * flat.numel())
        half = flat.to(torch.float16 if self.method == "fp16" else torch.bfloat16)
        return flat.copy_(average_dense(half, group))

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook: Any = default_hooks.fp16_compress_hook if self.method == "fp16" else default_hooks.bf16_compress_hook
        self.count(bucket.buffer(), 2 * bucket.buffer().numel())
        return hook(self._lane.group, bucket)  # type: ignore[no-any-return]
