"""Networks of emulated hosts, and the entry of ranks into them.

A rank enters its network before it joins any process group: the threads that send and receive are created then, and a
thread is in the network of the thread that created it. Ranks meet through a file, which all hosts of a machine have in
common.
"""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

from steptune.tuner.emulation import NETWORKS_VARIABLE, emulated_host, host_networks
from steptune.tuner.errors import PlatformError

_CLONE_NEWNET = 0x40000000
_LOOPBACK = "lo"


def enter_host_network(rank: int, num_ranks: int) -> None:
    """Move this thread, and threads that it starts later, into the network of its rank's host; do nothing if hosts have
    no networks of their own.

    Raises:
        PlatformError: The network cannot be entered, or does not have exactly one interface.
    """
    networks = host_networks()
    if not networks:
        return
    host = emulated_host(rank, num_ranks, len(networks))
    _enter(networks[host])
    interface = _interface(networks[host])
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


def check_host_networks() -> None:
    """Enter each network in turn to check it; call it only in a process that uses networks for nothing else.

    Raises:
        PlatformError: A network cannot be entered, or does not have exactly one interface.
    """
    for network in host_networks():
        _enter(network)
        _interface(network)


def _enter(network: Path) -> None:
    try:
        descriptor = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:  # there is no setns but on Linux
        raise PlatformError(
            f"{NETWORKS_VARIABLE}: the network {network} cannot be entered ({error}): this requires Linux, a path "
            "created by `ip netns` or `python -m steptune.tuner.network.emulated`, trials without isolation, and "
            "root or `unshare --user --map-root-user` before the command"
        ) from None


def _interface(network: Path) -> str:
    names = [name for _, name in socket.if_nameindex() if name != _LOOPBACK]
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise PlatformError(
            f"{NETWORKS_VARIABLE}: the network {network} must have exactly one interface other than {_LOOPBACK}, "
            f"got {found}"
        )
    return names[0]
