"""Which ranks share a host, and the process groups of a host, between hosts, and of all in the order of their hosts."""

from __future__ import annotations

import inspect
import platform
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import UnsupportedHere
from tuner.hardware import emulated_host, num_emulated_hosts
from tuner.network.rank_order import is_in_order, ring_order


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The two levels that a rank is on.

    Attributes:
        inside: Group of the ranks of its host.
        between: Group of the ranks that have its place on their hosts.
    """

    inside: Any
    between: Any
    ranks_per_host: int
    num_hosts: int


def make_levels() -> Levels:
    """Makes the groups; every rank calls it.

    Raises:
        UnsupportedHere: The hosts have different numbers of ranks.
    """
    import torch.distributed as dist

    hosts = members_of(host_of_ranks())
    sizes = {len(ranks) for ranks in hosts}
    if len(sizes) != 1:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise UnsupportedHere(f"two levels need as many ranks on every host; these have {counts}")
    inside, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in hosts])
    between, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*hosts, strict=True)])
    return Levels(inside=inside, between=between, ranks_per_host=sizes.pop(), num_hosts=len(hosts))


def ring_group() -> Any:
    """All ranks, those of each host one after another, so that a ring leaves each host once; every rank calls it.

    The default group where its ranks are in that order already.

    Warns:
        UserWarning: They are not, and this torch makes no group in another order.
    """
    import torch.distributed as dist

    hosts = host_of_ranks()
    if is_in_order(hosts):
        return dist.group.WORLD
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        warnings.warn(
            f"ranks of {len(set(hosts))} hosts are interleaved, and this torch sorts the ranks of every group: start "
            "ranks host by host, or install torch 2.13",
            UserWarning,
            stacklevel=2,
        )
        return dist.group.WORLD
    return dist.new_group(list(ring_order(hosts)), sort_ranks=False)


def host_of_ranks() -> list[str]:
    """What tells the host of every rank from others."""
    import torch.distributed as dist

    num_ranks, emulated = dist.get_world_size(), num_emulated_hosts()
    if emulated > 1:
        return [str(emulated_host(rank, num_ranks, emulated)) for rank in range(num_ranks)]
    hosts: list[str] = [""] * num_ranks
    dist.all_gather_object(hosts, platform.node())
    return hosts


def members_of(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each host, in the order of their first."""
    return [tuple(rank for rank, other in enumerate(hosts) if other == host) for host in dict.fromkeys(hosts)]
