"""Costs of collectives on given links, in the alpha-beta model.

A ring of n ranks passes chunks of a message from neighbour to neighbour. Every step costs the latency (alpha) and the
time of its chunk over the bandwidth (beta); every call costs a constant part besides, which does not grow with the
ranks: a launch, a hand-over to a thread. The time for adding chunks is part of the measured bandwidth.

    all-reduce                    2(n - 1) steps of S/n
    reduce-scatter, all-gather     (n - 1) steps of S/n
    all-to-all (pairwise)          (n - 1) steps of S/n

S is the larger of what goes into a rank and what comes out of it, so that the bytes over a link are S times the factor
with which NVIDIA's nccl-tests compute bus bandwidth.

Over several hosts all chunks of a step move at the same time, and the slowest edge of the ring holds up the others.
Edges that leave one host share its network: with ranks in the order of their hosts one edge of each host does; with
neighbours on different hosts all edges do.

When it is wrong: trees, reductions in switches (NVLS, SHARP), and other protocols for small messages are not rings;
they show as a large residual of the fit.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005);
Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations" (2009);
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from steptune.tuner.records import Link

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = "all_to_all"
ROUNDS = {ALL_REDUCE: 2, ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_TO_ALL: 1}
"""Number of passes of every chunk around the ring, by collective."""


def bus_factor(collective: str, num_ranks: int) -> float:
    """Return the number of bytes that the slowest link carries per byte of the message, as in the bus bandwidth of
    NVIDIA's nccl-tests.

    The message is the larger of what goes in and what comes out, n the size of the group:
    2(n - 1)/n for all_reduce, (n - 1)/n for all_gather, reduce_scatter and all_to_all, 1 for the others.
    """
    if num_ranks < 2:
        return 0.0
    return num_steps(collective, num_ranks) / num_ranks if collective in ROUNDS else 1.0


def num_steps(collective: str, num_ranks: int) -> int:
    """Return the number of consecutive steps of a ring, or of pairwise exchanges for an all-to-all."""
    return ROUNDS[collective] * (num_ranks - 1)


def ring_ns(collective: str, message_bytes: float, num_ranks: int, link: Link, num_sharing: int = 1) -> float:
    """Return the nanoseconds of a collective over ranks with one kind of link between them.

    Args:
        num_sharing: Groups that run at the same time over the same link.
    """
    if num_ranks < 2:
        return 0.0
    steps, chunk_bytes = num_steps(collective, num_ranks), message_bytes / num_ranks
    return link.call_ns + steps * _step_ns(chunk_bytes, link, num_sharing)


def flat_ring_ns(
    collective: str, message_bytes: float, host_of_rank: Sequence[int], inside: Link | None, between: Link | None
) -> float:
    """Return the nanoseconds of a ring over all ranks in their order, whichever hosts the ranks are on.

    Args:
        inside: Link between neighbours on one host; not used where there are none.
        between: Link between neighbours on different hosts; not used where there are none.
    """
    ranks = len(host_of_rank)
    if ranks < 2:
        return 0.0
    chunk_bytes, crossing = message_bytes / ranks, num_crossing(host_of_rank)
    step_ns = call_ns = 0.0
    if crossing:
        assert between is not None, "ranks on several hosts require a link between hosts"
        step_ns, call_ns = _step_ns(chunk_bytes, between, crossing), between.call_ns
    if any(host == other for host, other in _edges(host_of_rank)):
        assert inside is not None, "neighbouring ranks on one host require a link within the host"
        step_ns, call_ns = max(step_ns, _step_ns(chunk_bytes, inside)), max(call_ns, inside.call_ns)
    return call_ns + num_steps(collective, ranks) * step_ns


def two_level_all_reduce_ns(
    message_bytes: float, ranks_per_host: int, num_hosts: int, inside: Link, between: Link, *, sent_part: float = 1.0
) -> float:
    """Return the nanoseconds of a two-level all-reduce: reduce-scatter inside every host, all-reduce of each part
    between hosts, all-gather inside.

    Args:
        sent_part: Share of the bytes between hosts that is sent: less than 1 with compression.
    """
    scattered = ring_ns(REDUCE_SCATTER, message_bytes, ranks_per_host, inside)
    part_bytes = sent_part * message_bytes / ranks_per_host
    reduced = ring_ns(ALL_REDUCE, part_bytes, num_hosts, between, num_sharing=ranks_per_host)
    return scattered + reduced + ring_ns(ALL_GATHER, message_bytes, ranks_per_host, inside)


def flat_all_to_all_ns(
    message_bytes: float, host_of_rank: Sequence[int], inside: Link | None, between: Link | None
) -> float:
    """Return the nanoseconds of an all-to-all over n ranks: each rank sends 1/n of its message to every other rank.

    What leaves a host shares its network; exchanges inside hosts run at the same time.
    """
    ranks, on_host = len(host_of_rank), Counter(host_of_rank)
    part_bytes = message_bytes / max(1, ranks)
    times_ns = [0.0]
    for count in on_host.values():
        if count > 1:
            assert inside is not None, "several ranks on one host require a link within the host"
            times_ns.append(inside.call_ns + (count - 1) * _step_ns(part_bytes, inside))
        if ranks > count:
            assert between is not None, "ranks on several hosts require a link between hosts"
            times_ns.append(between.call_ns + (ranks - count) * _step_ns(part_bytes, between, count))
    return max(times_ns)


def num_crossing(host_of_rank: Sequence[int]) -> int:
    """Return the maximum number of the ring's edges that leave one host: 1 if every host's ranks are consecutive."""
    return max(Counter(host for host, other in _edges(host_of_rank) if host != other).values(), default=0)


def bus_bytes_per_s(collective: str, message_bytes: float, num_ranks: int, duration_ns: float) -> float:
    """Return the bus bandwidth: the bytes per second that a rank sends, which is comparable across collectives and
    numbers of ranks.
    """
    return bus_factor(collective, num_ranks) * message_bytes * 1e9 / duration_ns


def _step_ns(chunk_bytes: float, link: Link, num_sharing: int = 1) -> float:
    return link.latency_ns + num_sharing * chunk_bytes * 1e9 / link.bytes_per_s


def _edges(host_of_rank: Sequence[int]) -> list[tuple[int, int]]:
    """Return, for each rank, its host and the host of the next rank in the ring."""
    return list(zip(host_of_rank, [*host_of_rank[1:], host_of_rank[0]], strict=True))
