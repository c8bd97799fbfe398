"""Checks of a host, one per file: a name, and a function that inspects the host and yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from steptune.tuner.network.checks import (
    acs,
    affinity,
    device_files,
    gids,
    interfaces,
    iommu,
    locked_memory,
    mtu,
    nccl_settings,
    peer_memory,
    ports,
    relaxed_ordering,
)
from steptune.tuner.network.finding import NetworkFinding
from steptune.tuner.network.host import Host


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check of one setting. It raises `UnreadableError` for a file that it needs and cannot read."""

    name: str
    examine: Callable[[Host], Iterator[NetworkFinding]]


CHECKS = tuple(
    Check(name=module.NAME, examine=module.examine)
    for module in (
        peer_memory,
        ports,
        device_files,
        affinity,
        acs,
        iommu,
        relaxed_ordering,
        locked_memory,
        mtu,
        gids,
        interfaces,
        nccl_settings,
    )
)
