"""Profile beside a breakdown: the kernels, gaps and collectives with the most time."""

from __future__ import annotations

from steptune.tuner.records.base import Record


class KernelStats(Record):
    """All runs of one kernel.

    Attributes:
        name: As the trace has it.
        category: Of the breakdown.
        count: Runs in the profiled steps.
        total_ns: Of all runs.
        mean_ns: Of one run.
        max_ns: Of the longest run.
        tensor_cores: It uses them.
    """

    name: str
    category: str
    count: int
    total_ns: int
    share: float
    """Part of the profiled time."""
    mean_ns: int
    max_ns: int
    tensor_cores: bool
    occupancy: float | None = None
    """Estimated, weighted by time, 0 to 1."""


class GapSite(Record):
    """All gaps, or parts of gaps, with one cause that end with one kernel.

    Attributes:
        category: What the gaps are blamed on.
        count: How many there are.
        total_ns: Of all of them.
    """

    category: str
    kernel_after: str
    """Empty for what the end of the steps ends."""
    count: int
    total_ns: int


class CollectiveStats(Record):
    """All calls of one collective with messages of one size, over the ranks that were analysed.

    Attributes:
        name: "allreduce", "allgather", …
        group: The process group.
        group_size: Its ranks.
        dtype: Of the message; empty where the trace does not say.
    """

    name: str
    group: str
    group_size: int
    message_bytes: int
    """The larger of what goes in and what comes out; 0 where the trace does not say."""
    dtype: str
    count: int
    """Calls per rank."""
    total_ns: int
    """Mean over the ranks that have it, as is `exposed_ns`."""
    exposed_ns: int
    """Time that no compute hides. Two collectives at the same time count both."""
    latency_ns: int | None = None
    """Median over calls of the shortest over ranks: what is left when nobody waits. None with one rank."""
    skew_ns: int | None = None
    """Median over calls of the latest arrival less the earliest. None with one rank."""
    bus_bytes_per_s: float | None = None
    """Message size times the algorithm's factor, over the latency (with one rank: over the duration)."""


class TrialProfile(Record):
    """Kernels, gaps and collectives of the first rank with the most time, beside the breakdown."""

    kernels: tuple[KernelStats, ...] = ()
    gap_sites: tuple[GapSite, ...] = ()
    collectives: tuple[CollectiveStats, ...] = ()
