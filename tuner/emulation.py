"""Emulation of several hosts or devices on one machine, to try out multi-host features.

NCCL tells hosts apart by NCCL_HOSTID, and refuses two ranks of one host on one GPU.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import os
from pathlib import Path

from steptune.tuner.errors import PlatformError

HOSTS_VARIABLE = "STEPTUNE_EMULATED_HOSTS"
"""Environment variable with the number of emulated hosts among which this machine's ranks are divided, in rank order.
"""
NETWORKS_VARIABLE = "STEPTUNE_HOST_NETWORKS"
"""Environment variable with the network namespaces of the emulated hosts, one for each host, separated by commas."""
HOST_VARIABLE = "STEPTUNE_RANK_HOST"
"""Environment variable with the number of the host on which a rank runs; set if a job spans several hosts."""
DEVICES_VARIABLE = "STEPTUNE_EMULATED_DEVICES"
"""Environment variable with the number of devices into which the visible GPUs are divided: equal parts that share a
GPU's time.
"""


def num_emulated_hosts() -> int:
    """Return the number of emulated hosts; 1 where nothing is emulated.

    Raises:
        PlatformError: `HOSTS_VARIABLE` holds no number of hosts, or not the number of networks in `NETWORKS_VARIABLE`.
    """
    networks = host_networks()
    num_hosts = _number(HOSTS_VARIABLE, "hosts", len(networks) or 1)
    if networks and num_hosts != len(networks):
        raise PlatformError(
            f"{HOSTS_VARIABLE} is {num_hosts}, but {NETWORKS_VARIABLE} names {len(networks)} networks: unset "
            f"{HOSTS_VARIABLE}"
        )
    return num_hosts


def host_networks() -> tuple[Path, ...]:
    """Return the network namespace of each emulated host; empty where all hosts share this machine's."""
    return tuple(Path(path) for path in os.environ.get(NETWORKS_VARIABLE, "").split(",") if path)


def local_rank(rank: int) -> int:
    """Return the number of a rank among the ranks of its host."""
    return int(os.environ["LOCAL_RANK"]) if HOST_VARIABLE in os.environ else rank


def emulated_host(rank: int, num_ranks: int, num_hosts: int) -> int:
    """Return the emulated host of a rank: hosts get equal numbers of ranks, in rank order."""
    return rank * num_hosts // num_ranks


def ranks_per_device(num_visible: int) -> int:
    """Return the number of ranks that share a GPU; 1 where nothing is emulated.

    Args:
        num_visible: Number of visible GPUs.

    Raises:
        PlatformError: `DEVICES_VARIABLE` is no multiple of the number of GPUs, or is set although no GPU is visible.
    """
    num_devices = _number(DEVICES_VARIABLE, "devices", num_visible)
    if not num_visible:
        refuse_parts("no GPU is visible here")
        return 1
    if num_devices % num_visible:
        raise PlatformError(
            f"{DEVICES_VARIABLE} must be a multiple of the number of visible GPUs, got {num_devices} with "
            f"{num_visible} visible: set it to a multiple of {num_visible}, or unset it"
        )
    return num_devices // num_visible


def refuse_parts(why: str) -> None:
    """Refuse to run with GPUs that are divided into parts, where whole GPUs, or no GPUs, are required.

    Raises:
        PlatformError: `DEVICES_VARIABLE` is set.
    """
    if DEVICES_VARIABLE in os.environ:
        raise PlatformError(f"{DEVICES_VARIABLE} is set, but {why}: unset it")


def _number(variable: str, what: str, otherwise: int) -> int:
    text = os.environ.get(variable, str(otherwise))
    if not text.isdecimal() or (int(text) < 1 and variable in os.environ):
        raise PlatformError(
            f"{variable} must be a number of {what} of at least 1, got {text!r}: set it to 2, for example, or unset it"
        )
    return int(text)
