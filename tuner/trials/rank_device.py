"""Device that a rank trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptune.tuner.emulation import DEVICES_VARIABLE, local_rank, ranks_per_device
from steptune.tuner.errors import PlatformError
from steptune.tuner.hardware import device_memory_bytes
from steptune.tuner.trials.memory import limit_device_memory

if TYPE_CHECKING:
    import torch


def rank_device(kind: str, rank: int, memory_limit_bytes: int | None = None) -> torch.device:
    """Return the device of a rank, with memory limited: rank r of a host uses the r-th visible GPU. Emulated devices
    divide each GPU into parts, and each rank may fill one part.

    Raises:
        PlatformError: There are fewer GPUs than ranks.
    """
    import torch

    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    sharing = ranks_per_device(count)
    number = local_rank(rank)
    if number >= count * sharing:
        raise PlatformError(
            f"rank {rank} has no GPU: {count} are visible, for {count * sharing} ranks. Use fewer ranks, or, if "
            f"speed does not matter, set {DEVICES_VARIABLE} so that more ranks share GPUs"
        )
    device = torch.device("cuda", number // sharing)
    torch.cuda.set_device(device)
    part_bytes = device_memory_bytes(device) if sharing > 1 else None
    limits = [limit for limit in (memory_limit_bytes, part_bytes) if limit is not None]
    limit_device_memory(min(limits, default=None), device)
    return device
