"""Links of a cluster: from the user's bandwidths, the study's measurements, and assumptions."""

from __future__ import annotations

from steptune.tuner.records import Link, Topology

INSIDE_LATENCY_NS = 2_000.0
BETWEEN_LATENCY_NS = 20_000.0
"""Default latencies of one message in nanoseconds, inside a host (NVLink under NCCL) and between hosts (TCP in a data
centre).
"""


def inside_link(topology: Topology | None, bytes_per_s: float | None) -> tuple[Link | None, list[str]]:
    """Return the link between devices of a host, and the assumptions about it.

    Args:
        topology: Topology of the study; None where it has not measured its links.
        bytes_per_s: Bandwidth from one device to its neighbour, if given.
    """
    measured = topology.inside if topology is not None else None
    if bytes_per_s is None:
        return measured, []
    if measured is None:
        assumed = (
            f"the latency of a message inside a host is assumed to be {INSIDE_LATENCY_NS / 1e3:g} µs, because it "
            "was not measured"
        )
        return Link(kind="given", latency_ns=INSIDE_LATENCY_NS, bytes_per_s=bytes_per_s), [assumed]
    given = Link(kind="given", latency_ns=measured.latency_ns, call_ns=measured.call_ns, bytes_per_s=bytes_per_s)
    return given, []


def between_link(
    topology: Topology | None, bytes_per_s: float | None, latency_ns: float | None
) -> tuple[Link | None, list[str]]:
    """Return the link between hosts, and the assumptions about it.

    Args:
        bytes_per_s: One-way bandwidth of a host's network, if given.
        latency_ns: Latency of a message, if given.
    """
    measured = topology.between if topology is not None else None
    if bytes_per_s is None and latency_ns is None:
        return measured, []
    if bytes_per_s is None:
        if measured is None:
            return None, []
        bytes_per_s = measured.bytes_per_s
    assumed: list[str] = []
    if latency_ns is None:
        latency_ns = measured.latency_ns if measured is not None else BETWEEN_LATENCY_NS
        if measured is None:
            assumed.append(
                f"the latency of a message between hosts is assumed to be {latency_ns / 1e3:g} µs, because it was "
                "not given"
            )
    call_ns = topology.whole.call_ns if topology is not None else 0.0
    return Link(kind="given", latency_ns=latency_ns, bytes_per_s=bytes_per_s, call_ns=call_ns), assumed
