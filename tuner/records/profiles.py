"""Profile that accompanies a breakdown: the kernels, gaps and collectives with the most time."""

from __future__ import annotations

from steptune.tuner.records.base import Record


class KernelStats(Record):
    """Statistics of one kernel over all its runs.

    Attributes:
        name: Name in the trace.
        category: Category of the breakdown.
        count: Number of runs in the profiled steps.
        total_ns: Time of all runs.
        mean_ns: Mean time of a run.
        max_ns: Time of the longest run.
        tensor_cores: Whether it uses tensor cores.
    """

    name: str
    category: str
    count: int
    total_ns: int
    share: float
    """Share of the profiled time that the kernel takes."""
    mean_ns: int
    max_ns: int
    tensor_cores: bool
    occupancy: float | None = None
    """Estimated occupancy from 0 to 1, weighted by time; None where unknown."""


class GapSite(Record):
    """Statistics of all gaps, or parts of gaps, that have the same cause and end with the same kernel.

    Attributes:
        category: Category that is the cause of the gaps.
        count: Number of gaps.
        total_ns: Time of all gaps.
    """

    category: str
    kernel_after: str
    """Name of the kernel that ends the gaps; empty for gaps that last until the end of the steps."""
    count: int
    total_ns: int


class CollectiveStats(Record):
    """Statistics of one collective with one message size, over the ranks that were analysed.

    Attributes:
        name: Name of the collective: "all_reduce", "all_gather", …
        group: Name of the process group.
        group_size: Number of ranks in the group.
        dtype: Dtype of the message; empty where the trace does not record it.
    """

    name: str
    group: str
    group_size: int
    message_bytes: int
    """Message size: the larger of input and output; 0 where the trace does not record it."""
    dtype: str
    count: int
    """Number of calls per rank."""
    total_ns: int
    """Total time, as a mean over the ranks that take part."""
    exposed_ns: int
    """Time that is not hidden behind compute, as a mean over the ranks; where two collectives overlap, each counts in
    full."""
    latency_ns: int | None = None
    """Latency without waiting: the median over calls of the shortest duration among the ranks. None with one rank."""
    skew_ns: int | None = None
    """Skew: the median over calls of the latest arrival minus the earliest. None with one rank."""
    bus_bytes_per_s: float | None = None
    """Bus bandwidth: message size times the algorithm's bus factor, divided by the latency (with one rank, by the
    duration)."""


class TrialProfile(Record):
    """Kernels, gaps and collectives of the first rank that take the most time; accompanies the breakdown."""

    kernels: tuple[KernelStats, ...] = ()
    gap_sites: tuple[GapSite, ...] = ()
    collectives: tuple[CollectiveStats, ...] = ()
