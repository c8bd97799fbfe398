"""Effect of more sockets per connection on the links between hosts."""

from __future__ import annotations

from msgspec.structs import replace

from steptune.tuner.records import Link, Topology

CARRIED_EXPONENT, DELAYED_EXPONENT = 0.4, 0.75
"""Exponents with which the bandwidth, and the latency of a ring step, grow with the number of sockets. Between emulated
hosts, 16 sockets instead of one raised the bus bandwidth from 7–9 GB/s to 23 GB/s, cut exposed communication to a third
(`benchmarks/results/multi_gpu.jsonl`), and made messages of 1 MiB four times slower.
"""


def with_sockets(topology: Topology, sockets: int, measured_with: int) -> Topology:
    """Return the links as expected with `sockets` sockets, from those measured with `measured_with` sockets."""
    times = sockets / measured_with
    if topology.num_hosts == 1 or times == 1.0:
        return topology

    def changed(link: Link) -> Link:
        carried, delayed = times**CARRIED_EXPONENT, times**DELAYED_EXPONENT
        return replace(link, bytes_per_s=carried * link.bytes_per_s, latency_ns=delayed * link.latency_ns, timings=())

    between = None if topology.between is None else changed(topology.between)
    return replace(topology, between=between, whole=changed(topology.whole))
