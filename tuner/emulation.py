"""Emulation of several hosts or devices on one machine, to try out multi-host features.

NCCL tells hosts apart by NCCL_HOSTID, and refuses two ranks of one host on one GPU.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import os
from pathlib import Path

from steptune.tuner.errors import PlatformError

HOSTS_VARIABLE = "STEPTUNE_EMULATED_HOSTS"
"""Number of hosts among which the ranks of this machine are divided, in their order."""
NETWORKS_VARIABLE = "STEPTUNE_HOST_NETWORKS"
"""Network namespaces of such hosts, one for each, with commas between."""
HOST_VARIABLE = "STEPTUNE_RANK_HOST"
"""Number of the host that a rank is on, where a job is spread over several."""
DEVICES_VARIABLE = "STEPTUNE_EMULATED_DEVICES"
"""Number of devices into which the visible GPUs are divided: equal parts, which share a GPU's time."""


def num_emulated_hosts() -> int:
    """1 where nothing is emulated.

    Raises:
        PlatformError: The variable holds no number of hosts, or another one than there are networks of hosts.
    """
    networks = host_networks()
    num_hosts = _number(HOSTS_VARIABLE, "hosts", len(networks) or 1)
    if networks and num_hosts != len(networks):
        raise PlatformError(
            f"{HOSTS_VARIABLE} is {num_hosts}, but {NETWORKS_VARIABLE} names {len(networks)} networks: unset the first"
        )
    return num_hosts


def host_networks() -> tuple[Path, ...]:
    """The network namespace of each emulated host; empty where all share that of this machine."""
    return tuple(Path(path) for path in os.environ.get(NETWORKS_VARIABLE, "").split(",") if path)


def local_rank(rank: int) -> int:
    """The number of a rank among those of its host."""
    return int(os.environ["LOCAL_RANK"]) if HOST_VARIABLE in os.environ else rank


def emulated_host(rank: int, num_ranks: int, num_hosts: int) -> int:
    """The host that a rank is taken to be on: as many ranks each, in their order."""
    return rank * num_hosts // num_ranks


def ranks_per_device(num_visible: int) -> int:
    """Number of ranks that share a GPU; 1 where nothing is emulated.

    Args:
        num_visible: GPUs.

    Raises:
        PlatformError: The variable holds no multiple of their number, or there are none.
    """
    num_devices = _number(DEVICES_VARIABLE, "devices", num_visible)
    if not num_visible:
        refuse_parts("no GPU is visible here")
        return 1
    if num_devices % num_visible:
        raise PlatformError(
            f"{DEVICES_VARIABLE} is {num_devices}, and {num_visible} GPUs are visible, which are shared by equally "
            f"many ranks: set it to a multiple of {num_visible}, or unset it"
        )
    return num_devices // num_visible


def refuse_parts(why: str) -> None:
    """Refuse parts of GPUs where whole GPUs, or none, are needed.

    Raises:
        PlatformError: The variable is set.
    """
    if DEVICES_VARIABLE in os.environ:
        raise PlatformError(f"{DEVICES_VARIABLE} is set, and {why}: unset it")


def _number(variable: str, what: str, otherwise: int) -> int:
    text = os.environ.get(variable, str(otherwise))
    if not text.isdecimal() or (int(text) < 1 and variable in os.environ):
        raise PlatformError(f"{variable} is {text!r}, not a number of {what}: set it to 2, say, or unset it")
    return int(text)
