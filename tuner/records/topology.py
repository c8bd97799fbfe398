"""Placement of the ranks, and the measured cost of the links between them."""

from __future__ import annotations

from steptune.tuner.records.base import Record

EMULATED_NETWORK = "emulated network"
"""Kind of a link between hosts that are one machine: sockets over its loopback interface, or over shaped links."""


class CollectiveTiming(Record):
    """One measured point: how long a collective took.

    Attributes:
        collective: "all_reduce", "all_gather" or "reduce_scatter".
        num_ranks: Of the group.
    """

    collective: str
    num_ranks: int
    message_bytes: int
    """The larger of what goes in and what comes out."""
    duration_ns: int
    """Median over repeats of the slowest rank's."""


class Link(Record):
    """Link between ranks, in the alpha-beta model with a constant part for every call.

    A ring of n ranks takes `call_ns + steps * latency_ns + bytes / bytes_per_s`; see `tuner.network.collective_costs`.

    Attributes:
        kind: Between devices as `nvidia-smi topo -m` names it ("NV18", "PIX", "SYS"), else "shared memory", "loopback",
            "network" or "emulated network".
        latency_ns: Of one step of a ring: alpha.
        call_ns: Of one call, whatever it sends.
        timings: The points that were measured; empty for a link that somebody described.
    """

    kind: str
    latency_ns: float
    bytes_per_s: float
    """One way. Inside a host what one rank sends; between hosts what all ranks of a host send together."""
    call_ns: float = 0.0
    num_sharing: int = 1
    """Groups that ran at the same time over the same link when it was measured: one for each rank of a host."""
    fit_residual: float = 0.0
    """Root mean square of the relative errors of the fit."""
    timings: tuple[CollectiveTiming, ...] = ()


class Topology(Record):
    """Ranks by host, and the measured links inside hosts and between them.

    Attributes:
        host_of_rank: Number of the host of each rank, hosts numbered in the order of their first rank.
        inside: None where every host has one rank.
        between: None with one host.
        whole: A flat ring over all ranks, as if it had one kind of link.
        hardware_fingerprint: Of the hardware profile.
        measured_at: ISO 8601, UTC.
    """

    host_of_rank: tuple[int, ...]
    inside: Link | None
    between: Link | None
    whole: Link
    backend: str
    """"nccl" or "gloo"."""
    hardware_fingerprint: str
    measured_at: str

    @property
    def num_ranks(self) -> int:
        return len(self.host_of_rank)

    @property
    def num_hosts(self) -> int:
        return len(set(self.host_of_rank))

    @property
    def is_emulated(self) -> bool:
        """Say whether its hosts are one machine."""
        return EMULATED_NETWORK in self.whole.kind

    @property
    def ranks_per_host(self) -> int | None:
        """Number of ranks of each host; None where hosts differ."""
        counts = {self.host_of_rank.count(host) for host in self.host_of_rank}
        return counts.pop() if len(counts) == 1 else None
