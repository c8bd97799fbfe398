"""Records of a trace's analysis: everything that `steptune analyze` reports, except the breakdowns.

Like `steptune.tuner.records`: frozen, keyword-only, plain data. Times are integer nanoseconds, over all profiled
steps of a rank unless a name says otherwise; moments count from the beginning of the first step.
"""

from __future__ import annotations

from msgspec import field

from steptune.tuner.records import Breakdown, CollectiveStats, Finding, GapSite, Interval, KernelStats, Record, Replay


class Gap(Record):
    """Interval in which a device was idle."""

    start_ns: int
    length_ns: int
    category: str
    """Category to which most of the gap is attributed."""
    kernel_before: str
    kernel_after: str
    operator_before: str
    operator_after: str
    """Innermost operator that launched the kernel after the gap; `operator_before` is that of the kernel before it.
    Empty if not recorded.
    """
    source: str = ""
    """Line of the user's code, if the trace has call stacks."""
    module: str = ""
    """Module (`nn.Module`) of the operator that ends the gap, followed by "(backward)" if the operator belongs to the
    module's backward pass; recorded if the trace has call stacks.
    """


class GapStats(Record):
    """Statistics of the gaps of one device."""

    count: int
    total_ns: int
    median_ns: int
    p99_ns: int
    histogram: dict[str, int]
    """Number of gaps by length: "<1 us", "1-10 us", ..."""
    time_ns: dict[str, int]
    """Total time of the gaps in each of the length ranges of `histogram`."""
    longest: tuple[Gap, ...]
    sites: tuple[GapSite, ...] = ()
    """Gaps summed by cause and by the kernel that ends them, the longest total time first."""


class QueueStats(Record):
    """Launch queue of one stream: operations that were launched but have not begun."""

    stream: int
    num_launches: int
    mean_depth: float
    """Time-weighted mean of the queue's depth."""
    max_depth: int
    empty_share: float
    """Share of the launches that found the stream empty and idle."""
    median_delay_ns: int
    """Median time from the launch call to the start of the operation."""
    timeline: tuple[tuple[int, int], ...] = ()
    """Pairs of a time and the queue's depth from that time on, thinned out; every maximum is kept."""


class OperatorStats(Record):
    """Calls of one operator with the same argument shapes."""

    name: str
    shapes: str
    """Types and shapes by argument: "float[32, 64], Scalar"; empty where they were not recorded."""
    count: int
    device_ns: int
    """Time of the kernels and copies that the operator launched itself; on a CPU, its self time."""
    host_ns: int
    """Host time, without that of nested operators."""
    flops: float | None = None
    """FLOP of all calls, if the shapes determine them."""
    num_bytes: float | None = None
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    source: str = ""
    module: str = ""
    """Module (`nn.Module`) of the first call, if the trace has call stacks."""


class ModuleStats(Record):
    """Calls of one `nn.Module`, with the time of the modules nested in it."""

    name: str
    """Class names with object numbers, the outermost module first: "GPT_0.Block_3.MLP_3"."""
    count: int
    forward_ns: int
    """Time of the kernels and copies that the module's operators launched; on a CPU, of the operators themselves."""
    backward_ns: int
    """Time of the operators that compute gradients, measured like `forward_ns`."""
    own_ns: int
    """Forward and backward time, without that of nested modules."""
    num_launches: int = 0
    """Number of kernels and copies launched by the module's own operators, not those of nested modules; on a CPU,
    number of calls of these operators.
    """
    kernels: tuple[str, ...] = ()
    """Kernels launched by the module's own operators (on a CPU: these operators), those with the most time first."""
    num_bytes: float | None = None
    """Compulsory memory traffic of the module's own operators, in bytes; None unless it is known for all of them."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of the operands in matmuls of the module's own operators, if shapes were recorded."""


class RooflineRow(Record):
    """Operator, kernel or module for which FLOP or bytes are known, over all steps."""

    name: str
    count: int
    time_ns: int
    """Time on the device, without that of nested operators or modules."""
    floor_ns: int
    """Minimum time for this row's FLOP and bytes at the device's peak rates, which kernels seldom reach."""
    limit: str
    """Resource that determines the floor: "compute" or "memory"."""
    shapes: str = ""
    module: str = ""
    flops: float | None = None
    num_bytes: float | None = None
    saved_share: float | None = None
    """Share of the step that would be saved if these kernels ran at their floor, by simulation; None if they were not
    simulated.
    """

    @property
    def above_ns(self) -> int:
        """Return the time above the floor: the most that faster kernels could save."""
        return max(0, self.time_ns - self.floor_ns)


class Roofline(Record):
    """Work of the steps compared with the peaks of the device."""

    device: str
    """Name of the device; empty on a CPU, and if the trace does not record it."""
    peak_known: bool
    """True if the peaks of this device are known."""
    flops_per_s: dict[str, float] = field(default_factory=dict)
    """Peak FLOP per second of the device, by the dtype of the arithmetic (or TF32)."""
    bytes_per_s: float | None = None
    """Memory bandwidth of the device."""
    step_flops: float | None = None
    """FLOP of a step's matmuls, convolutions and attention, forward and backward, without recomputation; None if too
    few of them are known.
    """
    mfu: float | None = None
    """Model FLOPs utilisation: the time that `step_flops` would take at the peak rate of the arithmetic in use, as a
    share of the step time.
    """
    known_share: float | None = None
    """Share of compute kernels' time that is spent in kernels with a known floor."""
    silent: str = ""
    """Reason why FLOP are not reported; empty if they are."""
    operators: tuple[RooflineRow, ...] = ()
    """Operators, sorted by time above their floor, largest first; `kernels` and `modules` are sorted alike."""
    kernels: tuple[RooflineRow, ...] = ()
    modules: tuple[RooflineRow, ...] = ()
    """Modules, each with its own operators only, without nested modules; empty unless the trace has call stacks."""


class StackNode(Record):
    """Function, module or operator in a call stack, with everything that it calls."""

    name: str
    parent: int
    """Index of the parent in the same list, or -1."""
    time_ns: int
    """Time of the kernels and copies that the operators inside launched; on a CPU, time of these operators."""


class Synchronisation(Record):
    """Place in the code at which the host waits for the device, summed over the simulated steps."""

    call: str
    """Outermost operator that waits, for example "aten::item"; the API call if there is no operator."""
    source: str
    module: str
    """Module (`nn.Module`) in which the host waits; the line is in `source`. Recorded if the trace has call stacks."""
    count: int
    wait_ns: int
    """Total duration of the calls. The step may lose a different amount of time, because the host loses its lead over
    the device.
    """
    num_steps: int
    saved_share: float | None = None
    """Share of the step that would be saved without the waits at this place, by simulation; None if the steps could not
    be simulated.
    """


class MemoryClass(Record):
    """Memory of one class of tensors.

    Attributes:
        name: "parameters" (buffers among them), "gradients", "optimizer state", "activations", "temporary" or "other".
        peak_bytes: Maximum bytes of the class at any one time.
        at_peak_bytes: Bytes of the class when all classes together held the most.
    """

    name: str
    peak_bytes: int
    at_peak_bytes: int


class MemoryStats(Record):
    """Allocator memory of one device."""

    device: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_memory_bytes: int | None
    timeline: tuple[tuple[int, int, int], ...]
    """Tuples of a time, allocated bytes and reserved bytes, thinned out; every peak is kept."""
    classes: tuple[MemoryClass, ...] = ()
    """Memory by class of tensor; empty if the tensors' addresses are unknown, for instance from a trace alone."""
    class_timeline: tuple[tuple[int, ...], ...] = ()
    """Tuples of a time and the bytes of each class, in the order of `classes`, thinned out; the peak is kept."""


class RankWait(Record):
    """Time that a rank waited for others in collectives. The rank with the shortest wait is the one that delays the
    others.
    """

    rank: int
    wait_ns: int
    """Total wait in all collectives that were compared."""
    late_share: float
    """Share of the collectives in which the rank arrived last."""
    exposed_ns: int = 0
    """Wait that counts as exposed communication because no compute hides it. It is not transfer time of the network."""
    step_share: float = 1.0
    """Share of the rank's steps in which collectives were compared; below 1 if another rank recorded fewer steps."""


class WhatIf(Record):
    """Hypothetical change of the step: the resulting step time for the same samples, and the largest possible gain."""

    scenario: str
    step_time_ns: int
    gain: float
    """Rate after the change, divided by today's rate; 1.0 means no gain."""
    replayed: bool = False
    """True if the gain is an estimate from a simulation of the steps; False if it is an upper bound from category
    shares.
    """


class ExtraWork(Record):
    """Compute that only some of the steps have, such as an evaluation inside the loop.

    Attributes:
        steps: Numbers of these steps, from 1.
        time_ns: Total compute of these steps beyond that of the others.
        name: Annotation or Python function that only these steps have; empty if none is recorded.
    """

    steps: tuple[int, ...]
    time_ns: int
    name: str = ""


class ProcessGroup(Record):
    """Process group: ranks that exchange data.

    Attributes:
        ranks: Ranks of the group; empty if the trace does not name them.
    """

    name: str
    ranks: tuple[int, ...]
    num_hosts: int | None = None
    """Number of hosts that the group spans; None if the trace does not show which ranks share a host."""


class RankAnalysis(Record):
    """Analysis of one rank's trace."""

    file: str
    rank: int
    num_ranks: int
    framing: str
    num_events: int
    num_lost: int
    device_names: dict[str, str]
    breakdowns: tuple[Breakdown, ...]
    gaps: dict[str, GapStats] = field(default_factory=dict)
    """Gap statistics of each device."""
    queues: dict[str, tuple[QueueStats, ...]] = field(default_factory=dict)
    kernels: tuple[KernelStats, ...] = ()
    operators: tuple[OperatorStats, ...] = ()
    synchronisations: tuple[Synchronisation, ...] = ()
    """Places at which the host waits for the device, the most expensive first."""
    modules: tuple[ModuleStats, ...] = ()
    """Modules, the most time first; available if the trace has call stacks."""
    stacks: tuple[StackNode, ...] = ()
    """Time by call stack, outer frames first."""
    memory: tuple[MemoryStats, ...] = ()
    collectives: tuple[CollectiveStats, ...] = ()
    groups: tuple[ProcessGroup, ...] = ()
    tensor_core_share: float | None = None
    """Share of the time of matmul and convolution kernels that is spent in kernels on tensor cores."""
    step_time_cv: float | None = None
    """Coefficient of variation of the step times: standard deviation over mean."""
    extra_work: ExtraWork | None = None
    """Work that only some steps have; None if all steps do the same."""
    findings: tuple[Finding, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    """Timelines, one per breakdown."""
    lanes: tuple[Lane, ...] = ()
    """Lanes of each device (its activity) and of its streams (their operations), then of the host's threads."""
    what_ifs: tuple[WhatIf, ...] = ()
    """What-if scenarios for the busiest device."""
    roofline: Roofline | None = None
    """Roofline of the steps; None in older records."""
    first_step_ns: int = 0
    """Wall-clock time at which the first step begins; all other times are relative to it."""


class TraceAnalysis(Record):
    """Analysis of the traces of one run."""

    ranks: tuple[RankAnalysis, ...]
    collectives: tuple[CollectiveStats, ...] = ()
    """Collectives across ranks; if there is a single rank, the collectives of that rank."""
    waits: tuple[RankWait, ...] = ()
    clock_offsets_ns: dict[int, int] = field(default_factory=dict)
    """Offset of each rank, added to its wall-clock times so that collectives end together; 0 for the first rank."""
    findings: tuple[Finding, ...] = ()
    """Findings of the run: those of single ranks, without duplicates, and those that only several ranks together show.
    """
    replay: Replay | None = None
    """Simulation of the steps of all ranks together, without late ranks; None for a single rank, and in older records.
    """
    notes: tuple[str, ...] = ()


class Timeline(Record):
    """Activity of a device (or CPU) for drawing, reduced to buckets that cover the steps without gaps.

    A bucket has one category, or has the minimum width and the exact sum of each category in it, so
    that the sums over buckets are those of the breakdown.

    Attributes:
        rank: Rank of the process.
        device: Name of the device or CPU.
    """

    rank: int
    device: str
    step_boundaries_ns: tuple[int, ...]
    """Beginning of each step, and end of the last one."""
    end_ns: tuple[int, ...]
    """End of each bucket. A bucket begins where the previous one ends."""
    time_ns: tuple[dict[str, int], ...]
    """Nanoseconds of each category in each bucket, the category with the longest time first."""


class Lane(Record):
    """Activity of one device, stream or thread for drawing: cells in order of time, one per event.

    Neighbouring events that are too short to be drawn are merged into one cell for each category in their interval, one
    after another. Only merged cells overlap, and they have the same beginning and length.

    Attributes:
        device: Device of the stream; empty for a host thread.
        label: Text shown to users.
        names: Names of the lane's events, each once.
        categories: Names of the lane's categories, each once.
        length_ns: Length of each cell.
        category: Category of each cell, as an index into `categories`, from 0.
    """

    device: str
    kind: str
    """Kind of lane: "device" (exclusive categories, including gaps, which together cover the steps), "stream" or
    "thread".
    """
    label: str
    names: tuple[str, ...]
    categories: tuple[str, ...]
    start_ns: tuple[int, ...]
    """Beginning of each cell, measured from the beginning of the first step."""
    length_ns: tuple[int, ...]
    name: tuple[int, ...]
    """Name of the longest event in each cell, as an index into `names`, from 0."""
    category: tuple[int, ...]
    count: tuple[int, ...]
    """Number of events in each cell: more than one if it is merged."""
    busy_ns: tuple[int, ...]
    """Time within each cell that belongs to the cell's category."""

    def __post_init__(self) -> None:
        columns = (self.length_ns, self.name, self.category, self.count, self.busy_ns)
        if {len(column) for column in columns} != {len(self.start_ns)}:
            raise ValueError("the columns of a lane must be equally long")
        for index, table in ((self.name, self.names), (self.category, self.categories)):
            if index and not 0 <= min(index) <= max(index) < len(table):
                raise ValueError(f"a lane refers to entry {max(index)} of a table with {len(table)} entries")


class LaneTile(Record):
    """Lanes of a run within a time range, in as much detail as a screen can show.

    Attributes:
        low_ns: Beginning of the part; cells may reach beyond it.
        high_ns: End of the part.
        first_ns: Beginning of the earliest lane.
        last_ns: End of the latest lane.
        exact: True if nothing was merged.
        lanes: Lanes in the order of rows.
    """

    low_ns: int
    high_ns: int
    first_ns: int
    last_ns: int
    exact: bool
    lanes: tuple[Lane, ...]


class SpanPlace(Record):
    """Event of a lane, with its beginning and duration."""

    lane: str
    """Label of the lane."""
    start_ns: int
    """Start of the event, measured from the beginning of the first step."""
    length_ns: int
    """Duration of the event."""


class Difference(Record):
    """Difference of one quantity per step between two runs."""

    name: str
    before_ns: float
    after_ns: float
    low_ns: float | None = None
    """Lower end of the 95 % interval of the difference (after minus before); None if a run has only one step."""
    high_ns: float | None = None

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns

    @property
    def significant(self) -> bool:
        """Say whether the interval excludes zero."""
        return self.low_ns is not None and self.high_ns is not None and (self.low_ns > 0 or self.high_ns < 0)


class KernelDifference(Record):
    """Difference of one kernel between two runs, per step and device, as profiled."""

    name: str
    category: str
    before_ns: float
    after_ns: float
    before_count: float
    after_count: float

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns

    @property
    def state(self) -> str:
        """Kind of the change: "new", "gone" or "changed"."""
        return "new" if not self.before_count else "gone" if not self.after_count else "changed"


class GapDifference(KernelDifference):
    """Difference, between two runs, of the gaps that have the same cause (`category`) and are followed by the same
    kernel (`name`).
    """


class ModuleDifference(Record):
    """Difference of one `nn.Module`'s own operators between two runs, forward and backward, per step and device, as
    profiled.
    """

    name: str
    before_ns: float
    after_ns: float
    before_count: float
    """Number of kernels and copies that the operators launch; on a CPU, number of calls of these operators."""
    after_count: float
    cause: str
    """Changes of the module's kernels, dtypes, launches or bytes that come with the difference."""

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns


class Comparison(Record):
    """Difference between two runs, and its explanation. Changes are after minus before.

    Everything is per step and device: the mean over the ranks of a run and their devices.
    """

    before: str
    after: str
    num_steps: tuple[int, int]
    step: Difference
    categories: tuple[Difference, ...]
    """Differences of categories, the largest first; their sum is the difference of the step."""
    measured: Difference | None = None
    """Difference of the unprofiled step time, with its interval. It is computed from the timing windows of both trials,
    or taken from the study if that states the speeds of both configurations.
    """
    stated: Interval | None = None
    """Interval of the ratio of the two speeds, if a study states one."""
    stated_how: str = ""
    """Method by which a study measured the ratio of the two speeds; empty if no study states the ratio."""
    trusted: bool = True
    """True if both profiles can be trusted; otherwise the differences of categories are not conclusive."""
    kernels: tuple[KernelDifference, ...] = ()
    """Differences of kernels, the largest first."""
    gaps: tuple[GapDifference, ...] = ()
    modules: tuple[ModuleDifference, ...] = ()
    """Differences of modules; available if both traces have call stacks."""
    notes: tuple[str, ...] = ()
