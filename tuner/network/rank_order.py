"""Order of ranks over hosts, and its effect on the cost of a ring.

A ring goes through the ranks in their order. Where every host's ranks follow one another, one edge of the ring leaves
each host; where a launcher deals ranks out to hosts in turn (Slurm's `--distribution=cyclic`, Open MPI's
`--map-by node`), all edges do, and the network of a host carries that many times the bytes. NCCL orders its rings
by host itself; gloo does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from steptune.tuner.network.collective_costs import num_crossing
from steptune.tuner.network.finding import NetworkFinding, note, ok, problem

SUBJECT = "order of ranks"


def numbered(hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the host number of each rank; hosts are numbered in the order of their first rank."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)


def ring_order(hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the ranks grouped by host, hosts in the order of their first rank."""
    by_rank = numbered(hosts)
    return tuple(sorted(range(len(by_rank)), key=lambda rank: (by_rank[rank], rank)))


def is_in_order(hosts: Sequence[Hashable]) -> bool:
    """Say whether a ring in the order of the ranks crosses between hosts as rarely as possible."""
    return ring_order(hosts) == tuple(range(len(hosts)))


def examine_order(hosts: Sequence[Hashable], backend: str) -> NetworkFinding:
    """Return a finding about the cost of a ring over ranks in this order.

    Args:
        backend: "nccl" or "gloo".
    """
    by_rank = numbered(hosts)
    num_hosts = len(set(by_rank))
    if is_in_order(by_rank):
        where = "one host" if num_hosts == 1 else f"{num_hosts} hosts, each with consecutive ranks"
        return ok(SUBJECT, f"{len(by_rank)} ranks on {where}")
    edges, placed = num_crossing(by_rank), ", ".join(map(str, by_rank))
    found = (
        f"ranks 0 to {len(by_rank) - 1} are on hosts {placed}: a ring in this order has up to {edges} edges out of one "
        "host (1 is enough)"
    )
    fix = (
        "start ranks host by host (torchrun does so; Slurm: --distribution=block; Open MPI: --map-by slot); "
        "process groups that Steptune creates already have this order"
    )
    effect = f"a flat all-reduce sends {edges} times as many bytes over a host's network as with ranks in order"
    if backend == "nccl":
        return note(SUBJECT, found, effect=f"{effect}, except with NCCL, which orders its rings by host", fix=fix)
    return problem(SUBJECT, found, effect=effect, fix=fix)
