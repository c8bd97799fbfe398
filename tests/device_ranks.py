"""What tests of ranks on CUDA devices share: how NCCL meets on a host without a network, and how close losses are."""

from __future__ import annotations

import pytest
import torch

LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVIDIA_TF32_OVERRIDE": "0",
}
TOLERANCE = 2e-4
"""Of a loss near one after 20 updates of AdamW; a device adds up products in an order of its own for each shape."""


def needs(num_devices: int) -> None:
    found = torch.cuda.device_count()
    if found < num_devices:
        pytest.skip(f"needs {num_devices} CUDA devices, of which there are {found}")
