"""Process groups by host: inside a host, between hosts, and of all ranks in host order.

Hosts can be emulated on one machine. For NCCL ranks are on one host when they have one host id, so each rank gets its
emulated host's: what crosses hosts then goes through sockets over the loopback interface, as fast as the machine's
memory and cores let it, and what stays inside keeps NVLink and shared memory.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import inspect
import os
import platform
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from steptune.tuner.emulation import HOST_VARIABLE, emulated_host, num_emulated_hosts
from steptune.tuner.errors import UnsupportedError
from steptune.tuner.network.rank_order import is_in_order, ring_order

HOST_ID = "NCCL_HOSTID"
OVER_LOOPBACK = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that make NCCL connect emulated hosts over loopback, without a search for a real network."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Process groups to which a rank belongs on two levels: inside its host, and between hosts.

    Attributes:
        inside: Group of the ranks of its host.
        between: Group of the ranks with the same position on their hosts.
    """

    inside: Any
    between: Any
    ranks_per_host: int
    num_hosts: int


def make_levels() -> Levels:
    """Create the groups of both levels; every rank must call it.

    Raises:
        UnsupportedError: The hosts have different numbers of ranks.
    """
    import torch.distributed as dist

    hosts = members_of(host_of_ranks())
    sizes = {len(ranks) for ranks in hosts}
    if len(sizes) != 1:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise UnsupportedError(f"two-level all-reduce requires the same number of ranks on every host, got {counts}")
    inside, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in hosts])
    between, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*hosts, strict=True)])
    return Levels(inside=inside, between=between, ranks_per_host=sizes.pop(), num_hosts=len(hosts))


def ring_group() -> Any:
    """Return a group of all ranks ordered by host, so that a ring enters and leaves each host only once; every rank
    must call it.

    It is the default group where the ranks are in that order already.

    Warns:
        UserWarning: The ranks are in another order, and this torch cannot reorder a group.
    """
    import torch.distributed as dist

    hosts = host_of_ranks()
    if is_in_order(hosts):
        return dist.group.WORLD
    if not _can_order():
        warnings.warn(
            f"the ranks of {len(set(hosts))} hosts are interleaved, and this version of torch cannot reorder "
            "ranks within a process group: start ranks host by host, or install torch 2.13",
            UserWarning,
            stacklevel=2,
        )
        return dist.group.WORLD
    return new_group(ring_order(hosts))


def new_group(ranks: Sequence[int]) -> Any:
    """Create a process group that keeps the given order of ranks if this torch supports that; every rank must call
    this.
    """
    import torch.distributed as dist

    options: dict[str, Any] = {"sort_ranks": False} if _can_order() else {}
    return dist.new_group(list(ranks), **options)


def _can_order() -> bool:
    import torch.distributed as dist

    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def host_of_ranks() -> list[str]:
    """Return, for every rank, a name that identifies its host."""
    import torch.distributed as dist

    num_ranks, emulated = dist.get_world_size(), num_emulated_hosts()
    if emulated > 1:
        return [str(emulated_host(rank, num_ranks, emulated)) for rank in range(num_ranks)]
    hosts: list[str] = [""] * num_ranks
    dist.all_gather_object(hosts, os.environ.get(HOST_VARIABLE) or platform.node())
    return hosts


def emulate_for_nccl(
    rank: int, num_ranks: int, *, per_device: int = 1, variables: MutableMapping[str, str] = os.environ
) -> None:
    """Make NCCL see this rank's emulated host. Call it before NCCL's first group is created; it does nothing without
    emulation.

    The connection between hosts is the user's where one is set (`NCCL_SOCKET_IFNAME` of a shaped interface, say).

    Args:
        per_device: Ranks that share a GPU, which NCCL refuses within a host. Where some do, each rank is a host.
    """
    num_hosts = num_emulated_hosts()
    if num_hosts == per_device == 1:
        return
    host = f"steptune-host-{emulated_host(rank, num_ranks, num_hosts)}"
    variables[HOST_ID] = host if per_device == 1 else f"{host}-{rank}"
    for name, value in OVER_LOOPBACK.items():
        variables.setdefault(name, value)


def emulation_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make NCCL see this machine as several hosts; empty without emulation."""
    if HOST_ID not in variables:
        return {}
    return {name: variables[name] for name in (HOST_ID, *OVER_LOOPBACK) if name in variables}


def members_of(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of each host; hosts are ordered by their first rank."""
    return [tuple(rank for rank, other in enumerate(hosts) if other == host) for host in dict.fromkeys(hosts)]
