"""Process groups of a run: their ranks, and the number of hosts that they span.

A trace names the ranks of each group, and lists all devices that its process sees. Launchers number ranks host by host,
one device each. If a process sees several devices and works on the one that its rank has by that rule, the rule gives
the hosts of all ranks; otherwise hosts are unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from steptune.tuner.profiling.trace import Trace
from steptune.tuner.trace_records import ProcessGroup

LEAST_DEVICES = 2
"""Minimum number of visible devices from which ranks per host are inferred: if a process sees only one device, its host
may have more.
"""


def process_groups(trace: Trace, device_numbers: Sequence[int]) -> tuple[ProcessGroup, ...]:
    """Return the process groups that a trace describes.

    Args:
        device_numbers: Numbers of the devices that the process worked on.
    """
    described = trace.distributed.get("pg_config")
    rows = [row for row in described if isinstance(row, dict)] if isinstance(described, list) else []
    per_host = _ranks_per_host(trace, device_numbers)
    found = []
    for row in rows:
        ranks, size = row.get("ranks"), row.get("pg_size")
        members = tuple(ranks) if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks) else ()
        if not members and size == trace.num_ranks:
            members = tuple(range(trace.num_ranks))
        hosts = len({rank // per_host for rank in members}) if per_host and members else None
        found.append(ProcessGroup(name=str(row.get("pg_name", "")), ranks=members, num_hosts=hosts))
    return tuple(found)


def _ranks_per_host(trace: Trace, device_numbers: Sequence[int]) -> int | None:
    """Return the number of ranks per host; None if the trace does not show it."""
    visible = len(trace.devices)
    if trace.rank is None or len(device_numbers) != 1 or visible < LEAST_DEVICES:
        return None
    # The first rank works on the first device whatever the rule: hosts that are full speak for it.
    told = trace.rank > 0 or trace.num_ranks % visible == 0
    return visible if told and device_numbers[0] == trace.rank % visible else None


def hosts_of(groups: Sequence[ProcessGroup], name: str) -> int | None:
    """Return the largest number of hosts that a group of this name spans; None if unknown."""
    return max((group.num_hosts for group in groups if group.name == name and group.num_hosts), default=None)


def whole_groups(groups: Iterable[ProcessGroup], ranks: Collection[int], known: Collection[int]) -> list[ProcessGroup]:
    """Return groups that together contain exactly these ranks, each rank once, the largest group first; empty if there
    are no such groups.

    Args:
        known: Ranks that have a trace; other ranks of a group are ignored.
    """
    left, found = set(ranks), []
    for group in sorted(groups, key=lambda group: (-len(group.ranks), group.name)):
        members = set(group.ranks) & set(known)
        if len(members) > 1 and members <= left:
            left -= members
            found.append(group)
    return found if not left else []


def reach(num_hosts: int | None) -> str:
    """Describe the number of hosts that a group spans; empty if unknown."""
    return "" if num_hosts is None else "within a host" if num_hosts == 1 else f"across {num_hosts} hosts"
