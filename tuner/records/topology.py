"""Placement of ranks on hosts, and the measured cost of their links."""

from __future__ import annotations

from steptune.tuner.records.base import Record

EMULATED_NETWORK = "emulated network"
"""Kind of a link between emulated hosts on one machine: sockets over the loopback interface, or over rate-limited
links."""


class CollectiveTiming(Record):
    """One measured duration of a collective.

    Attributes:
        collective: "all_reduce", "all_gather" or "reduce_scatter".
        num_ranks: Number of ranks in the group.
    """

    collective: str
    num_ranks: int
    message_bytes: int
    """Message size: the larger of input and output."""
    duration_ns: int
    """Duration on the slowest rank, as the median over repeats."""


class Link(Record):
    """Link between ranks, in the alpha-beta model with a constant part for every call.

    A ring of n ranks takes `call_ns + steps * latency_ns + bytes / bytes_per_s`; see `tuner.network.collective_costs`.

    Attributes:
        kind: Name of the link: between devices as in `nvidia-smi topo -m` ("NV18", "PIX", "SYS"), else "shared memory",
            "loopback", "network" or "emulated network".
        latency_ns: Latency of one step of a ring: alpha.
        call_ns: Constant cost of one call, independent of its size.
        timings: Measured points; empty for a link described by the user.
    """

    kind: str
    latency_ns: float
    bytes_per_s: float
    """One-way bandwidth: inside a host, of one rank; between hosts, of all ranks of a host together."""
    call_ns: float = 0.0
    num_sharing: int = 1
    """Number of groups that used the link at the same time during its measurement: one for each rank of a host."""
    fit_residual: float = 0.0
    """Root mean square of the relative errors of the fit."""
    timings: tuple[CollectiveTiming, ...] = ()


class Topology(Record):
    """Placement of ranks on hosts, and the measured links inside hosts and between them.

    Attributes:
        host_of_rank: Host number of each rank; hosts are numbered in the order of their first rank.
        inside: Link inside a host; None where every host has one rank.
        between: Link between hosts; None with one host.
        whole: Link fitted to a flat ring over all ranks, as if all its edges were of one kind.
        hardware_fingerprint: Fingerprint of the hardware profile.
        measured_at: Time of the measurement in ISO 8601, UTC.
    """

    host_of_rank: tuple[int, ...]
    inside: Link | None
    between: Link | None
    whole: Link
    backend: str
    """Communication backend: "nccl" or "gloo"."""
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
        """True if the hosts are emulated on one machine."""
        return EMULATED_NETWORK in self.whole.kind

    @property
    def ranks_per_host(self) -> int | None:
        """Number of ranks of each host; None where hosts differ."""
        counts = {self.host_of_rank.count(host) for host in self.host_of_rank}
        return counts.pop() if len(counts) == 1 else None
