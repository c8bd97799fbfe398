"""The rank of this process."""

from __future__ import annotations

import os

import torch


def has_group() -> bool:
    """Say whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks: 0 and 1 without a process group."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if has_group() else (0, 1)


def num_ranks_here() -> int:
    """Return the number of ranks on this host, as the launcher states it; else the number of all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", rank_and_size()[1]))
