"""Gradients in float16 or bfloat16: half the bytes, added up in 16 bits.

Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.training.compression.base import Compression

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket


class SixteenBit(Compression):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook: Any = default_hooks.fp16_compress_hook if self.method == "fp16" else default_hooks.bf16_compress_hook
        flat = bucket.buffer()
        self.count(flat, 2 * flat.numel())
        return hook(dist.group.WORLD, bucket)  # type: ignore[no-any-return]
