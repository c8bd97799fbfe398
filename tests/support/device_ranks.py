"""Helpers for ranks on CUDA devices in tests: how NCCL meets on a host without a network, and how close losses are."""

from __future__ import annotations

import pytest
import torch

from steptune.tuner.emulation import HOSTS_VARIABLE, ranks_per_device
from steptune.tuner.training.hosts import emulate_for_nccl

LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVIDIA_TF32_OVERRIDE": "0",
}
TOLERANCE = 2e-4
"""Error of a loss near one after 20 updates of AdamW; a device adds up products in its own order for each shape."""


def num_devices() -> int:
    """Visible ones, or the parts of them that are taken for devices (`STEPTUNE_EMULATED_DEVICES`)."""
    visible = torch.cuda.device_count()
    return visible * ranks_per_device(visible)


def variables(rank: int, num_ranks: int, num_hosts: int = 1) -> dict[str, str]:
    """Environment variables of a rank: the way to others, and its host if it is not the machine itself."""
    found = dict(LOOPBACK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOSTS_VARIABLE, str(num_hosts))
        emulate_for_nccl(rank, num_ranks, per_device=ranks_per_device(torch.cuda.device_count()), variables=found)
    return found


def needs(wanted: int) -> None:
    found = num_devices()
    if found < wanted:
        pytest.skip(f"needs {wanted} CUDA devices, of which there are {found}")
