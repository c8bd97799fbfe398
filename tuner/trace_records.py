"""The records of a trace's analysis: everything that `steptune analyze` says, beside the breakdowns.

Like `steptune.tuner.records`: frozen, keyword-only, plain data. Times are integer nanoseconds, over all profiled
steps of a rank unless a name says otherwise; moments count from the beginning of the first step.
"""

from __future__ import annotations

from msgspec import field

from steptune.tuner.records import Breakdown, CollectiveStats, Finding, GapSite, Interval, KernelStats, Record, Replay


class Gap(Record):
    """One stretch in which a device did nothing."""

    start_ns: int
    length_ns: int
    category: str
    """Category that most of it is blamed on."""
    kernel_before: str
    kernel_after: str
    operator_before: str
    operator_after: str
    """Innermost operators that launched the kernels on both sides; empty where the trace does not say."""
    source: str = ""
    """Line of the user's code, where the trace has call stacks."""
    module: str = ""
    """The `nn.Module` of the operator that ends it, and "(backward)" of its gradient; where the trace has call stacks.
    """


class GapStats(Record):
    """The gaps of one device."""

    count: int
    total_ns: int
    median_ns: int
    p99_ns: int
    histogram: dict[str, int]
    """Gaps by length: "<1 us", "1-10 us", ..."""
    time_ns: dict[str, int]
    """Time in gaps by the same lengths."""
    longest: tuple[Gap, ...]
    sites: tuple[GapSite, ...] = ()
    """Sites of the gaps, the most time first."""


class QueueStats(Record):
    """Launch queue of one stream: launched operations that have not begun."""

    stream: int
    num_launches: int
    mean_depth: float
    """Mean over time."""
    max_depth: int
    empty_share: float
    """Share of the launches that found the stream empty and idle."""
    median_delay_ns: int
    """Time from the call to the start."""
    timeline: tuple[tuple[int, int], ...] = ()
    """(time, depth from then on), thinned out; every largest depth is kept."""


class OperatorStats(Record):
    """All calls of one operator with arguments of one shape."""

    name: str
    shapes: str
    """Types and shapes by argument: "float[32, 64], Scalar"; empty where they were not recorded."""
    count: int
    device_ns: int
    """Time of the kernels and copies that it launched itself; on a CPU its own time."""
    host_ns: int
    """Time without the operators inside it."""
    flops: float | None = None
    """FLOP of all calls, where the shapes allow it."""
    num_bytes: float | None = None
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    source: str = ""
    module: str = ""
    """The `nn.Module` of the first call; where the trace has call stacks."""


class ModuleStats(Record):
    """All calls of one `nn.Module`, with the modules inside of it."""

    name: str
    """Classes with the number of the object, the outermost first: "GPT_0.Block_3.MLP_3"."""
    count: int
    forward_ns: int
    """Time of the kernels and copies that its operators launched; on a CPU of the operators themselves."""
    backward_ns: int
    """Time of the operators that compute their gradients, counted alike."""
    own_ns: int
    """Time of both without the modules inside of it."""
    num_launches: int = 0
    """Kernels and copies of its own operators; on a CPU the operators' calls."""
    kernels: tuple[str, ...] = ()
    """Kernels (on a CPU operators) without the modules inside of it, the most time first."""
    num_bytes: float | None = None
    """Compulsory bytes of its own operators; None where not all of them are known."""
    dtypes: tuple[str, ...] = ()
    """Types of what its own operators multiply, where shapes were recorded."""


class RooflineRow(Record):
    """An operator, kernel or module whose work is known, over all steps."""

    name: str
    count: int
    time_ns: int
    """Time of the kernels and copies that it launched itself."""
    floor_ns: int
    """The least time of its FLOP and bytes at the device's peaks: a bound, which kernels seldom reach."""
    limit: str
    """The longer of the two: "compute" or "memory"."""
    shapes: str = ""
    module: str = ""
    flops: float | None = None
    num_bytes: float | None = None
    saved_share: float | None = None
    """Share of the step saved with these kernels at their floor, by a simulation; of the first kernels, where it could
    be done."""

    @property
    def above_ns(self) -> int:
        """Time above the floor: the most that another kernel for it could save."""
        return max(0, self.time_ns - self.floor_ns)


class Roofline(Record):
    """Work of the steps beside the peaks of the device."""

    device: str
    """Name of the device; empty on a CPU, and where a trace does not name it."""
    peak_known: bool
    """The peaks of this device are known."""
    flops_per_s: dict[str, float] = field(default_factory=dict)
    """Peak by arithmetic."""
    bytes_per_s: float | None = None
    """Bandwidth of its memory."""
    step_flops: float | None = None
    """FLOP of the matmuls, convolutions and attention of a step, forward and backward, without recomputation; None
    where too few of them are known."""
    mfu: float | None = None
    """Model FLOPs utilisation: these FLOP at the peak of the arithmetic that ran, over the time of the step."""
    known_share: float | None = None
    """Share of the time of computing kernels that has a floor."""
    silent: str = ""
    """Reason why FLOP are not stated; empty where they are."""
    operators: tuple[RooflineRow, ...] = ()
    """The most time above the floor first, as in the two others."""
    kernels: tuple[RooflineRow, ...] = ()
    modules: tuple[RooflineRow, ...] = ()
    """Modules by their own operators, without the modules inside; where the trace has call stacks."""


class StackNode(Record):
    """A function, module or operator in a call stack, with what is inside of it."""

    name: str
    parent: int
    """Place of the one around it in the same list, or -1."""
    time_ns: int
    """Time of the kernels and copies that operators in it launched; on a CPU of the operators themselves."""


class Synchronisation(Record):
    """A place in which the host waits for the device, over the steps that were simulated."""

    call: str
    """The outermost operator, or the call of the API where there is none: "aten::item"."""
    source: str
    module: str
    """Line and `nn.Module`; where the trace has call stacks."""
    count: int
    wait_ns: int
    """Length of the calls. What they cost is another thing: the host loses its lead."""
    num_steps: int
    saved_share: float | None = None
    """Share of the step saved without the waits of this place, by a simulation; None where the steps could not be
    simulated."""


class MemoryClass(Record):
    """Memory of one class of tensors.

    Attributes:
        name: "parameters" (buffers among them), "gradients", "optimizer state", "activations", "temporary" or "other".
        peak_bytes: The most that it held at once.
        at_peak_bytes: Held when all classes together held most.
    """

    name: str
    peak_bytes: int
    at_peak_bytes: int


class MemoryStats(Record):
    """The allocator of one device."""

    device: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_memory_bytes: int | None
    timeline: tuple[tuple[int, int, int], ...]
    """(time, allocated, reserved), thinned out; every peak is kept."""
    classes: tuple[MemoryClass, ...] = ()
    """Memory by class of tensor; empty where the tensors' addresses are not known, as of a trace alone."""
    class_timeline: tuple[tuple[int, ...], ...] = ()
    """(time, bytes of each class in their order), thinned out; the peak is kept."""


class RankWait(Record):
    """Time that a rank waited for others in collectives: the one that waits least is waited for."""

    rank: int
    wait_ns: int
    """Time in all collectives that were compared."""
    late_share: float
    """Share of the collectives in which it arrived last."""
    exposed_ns: int = 0
    """Wait that counts as exposed communication, because no compute hides it. It is not the network's time."""
    step_share: float = 1.0
    """Share of its steps whose collectives were compared. Another rank may have recorded fewer steps."""


class WhatIf(Record):
    """A step of the same samples, if something were different: the most that it could gain."""

    scenario: str
    step_time_ns: int
    gain: float
    """Rate over today's; 1.0 is none."""
    replayed: bool = False
    """True for a simulation of the steps, not the shares of categories: an estimate, not the most that it could be."""


class ExtraWork(Record):
    """Compute that only some of the steps have, as an evaluation inside of the loop.

    Attributes:
        steps: Their numbers, from 1.
        time_ns: Compute in all of them beyond that of the others.
        name: Annotation or Python function that only they have; empty where none is recorded.
    """

    steps: tuple[int, ...]
    time_ns: int
    name: str = ""


class ProcessGroup(Record):
    """Ranks that exchange data.

    Attributes:
        ranks: Empty where the trace does not name them.
    """

    name: str
    ranks: tuple[int, ...]
    num_hosts: int | None = None
    """None where the trace does not show which ranks share a host."""


class RankAnalysis(Record):
    """One rank's trace."""

    file: str
    rank: int
    num_ranks: int
    framing: str
    num_events: int
    num_lost: int
    device_names: dict[str, str]
    breakdowns: tuple[Breakdown, ...]
    gaps: dict[str, GapStats] = field(default_factory=dict)
    """Statistics of the gaps by device."""
    queues: dict[str, tuple[QueueStats, ...]] = field(default_factory=dict)
    kernels: tuple[KernelStats, ...] = ()
    operators: tuple[OperatorStats, ...] = ()
    synchronisations: tuple[Synchronisation, ...] = ()
    """The largest cost first."""
    modules: tuple[ModuleStats, ...] = ()
    """Available where the trace has call stacks; the most time first."""
    stacks: tuple[StackNode, ...] = ()
    """Time by call stack, outer ones first."""
    memory: tuple[MemoryStats, ...] = ()
    collectives: tuple[CollectiveStats, ...] = ()
    groups: tuple[ProcessGroup, ...] = ()
    tensor_core_share: float | None = None
    """Share of tensor cores in the time of matrix kernels."""
    step_time_cv: float | None = None
    """Standard deviation of the steps' times over their mean."""
    extra_work: ExtraWork | None = None
    """None where all steps do the same."""
    findings: tuple[Finding, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    """One for each breakdown."""
    lanes: tuple[Lane, ...] = ()
    """Lanes of each device (what it did) and of its streams (what they ran), then of the host's threads."""
    what_ifs: tuple[WhatIf, ...] = ()
    """Scenarios of the busiest device."""
    roofline: Roofline | None = None
    """None in older records."""
    first_step_ns: int = 0
    """The beginning of the first step by the wall clock, where moments count from."""


class TraceAnalysis(Record):
    """The traces of one run."""

    ranks: tuple[RankAnalysis, ...]
    collectives: tuple[CollectiveStats, ...] = ()
    """Collectives across ranks; with one rank its own."""
    waits: tuple[RankWait, ...] = ()
    clock_offsets_ns: dict[int, int] = field(default_factory=dict)
    """Offset of each rank, added to its wall-clock times so that collectives end together; 0 for the first rank."""
    findings: tuple[Finding, ...] = ()
    """Findings of the run: those of its ranks, each once, with what only several ranks show."""
    replay: Replay | None = None
    """All ranks together, without late ones; None of one rank, and in older records."""
    notes: tuple[str, ...] = ()


class Timeline(Record):
    """Activity of a device (or CPU), thinned out for a picture: buckets that tile the steps.

    A bucket has one category, or is of the least width and has what happens in it summed up exactly, so
    that the sums over buckets are those of the breakdown.

    Attributes:
        rank: The process.
        device: Its device, or its CPU.
    """

    rank: int
    device: str
    step_boundaries_ns: tuple[int, ...]
    """Each step's beginning, and the last one's end."""
    end_ns: tuple[int, ...]
    """End of each bucket; it begins where the one before it ends."""
    time_ns: tuple[dict[str, int], ...]
    """Nanoseconds of each category in each bucket, the longest first."""


class Lane(Record):
    """Activity of one device, stream or thread: cells in order, an event each.

    Where neighbours are too short for a picture, they are merged: a cell for each category in their stretch, one after
    another. Only those overlap, and they have the same beginning and length.

    Attributes:
        device: Whose stream it is; empty of a thread of the host.
        label: For people.
        names: Names of its events, each once.
        categories: Names of its categories, each once.
        length_ns: By cell.
        category: By cell, a number in `categories`, from 0.
    """

    device: str
    kind: str
    """"device" (its exclusive categories, gaps included, which tile the steps), "stream" or "thread"."""
    label: str
    names: tuple[str, ...]
    categories: tuple[str, ...]
    start_ns: tuple[int, ...]
    """Beginning of each cell, from the beginning of the first step."""
    length_ns: tuple[int, ...]
    name: tuple[int, ...]
    """Number in `names`, from 0, of the longest event in each cell."""
    category: tuple[int, ...]
    count: tuple[int, ...]
    """Events in it: more than one where it is merged."""
    busy_ns: tuple[int, ...]
    """Time in it that is of its category."""

    def __post_init__(self) -> None:
        columns = (self.length_ns, self.name, self.category, self.count, self.busy_ns)
        if {len(column) for column in columns} != {len(self.start_ns)}:
            raise ValueError("the columns of a lane must be equally long")
        for index, table in ((self.name, self.names), (self.category, self.categories)):
            if index and not 0 <= min(index) <= max(index) < len(table):
                raise ValueError(f"a lane refers to number {max(index)} of a table of {len(table)}")


class LaneTile(Record):
    """Part of the time of a run's lanes, as closely as a screen can show it.

    Attributes:
        low_ns: Where it begins; cells may reach beyond it.
        high_ns: Where it ends.
        first_ns: Where the earliest of all lanes begins.
        last_ns: Where the latest of all lanes ends.
        exact: Nothing was merged for it.
        lanes: In the order of rows.
    """

    low_ns: int
    high_ns: int
    first_ns: int
    last_ns: int
    exact: bool
    lanes: tuple[Lane, ...]


class SpanPlace(Record):
    """One event of a lane."""

    lane: str
    """Label of it."""
    start_ns: int
    """Time from the beginning of the first step."""
    length_ns: int
    """Its duration."""


class Difference(Record):
    """One quantity per step on two sides."""

    name: str
    before_ns: float
    after_ns: float
    low_ns: float | None = None
    """95 % interval of after less before; None where a side has one step only."""
    high_ns: float | None = None

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns

    @property
    def significant(self) -> bool:
        """Say whether the interval excludes zero."""
        return self.low_ns is not None and self.high_ns is not None and (self.low_ns > 0 or self.high_ns < 0)


class KernelDifference(Record):
    """One kernel on two sides, per step and device as profiled."""

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
        """Change of it: "new", "gone" or "changed"."""
        return "new" if not self.before_count else "gone" if not self.after_count else "changed"


class GapDifference(KernelDifference):
    """The gaps with one cause (`category`) that end with one kernel (`name`), on two sides."""


class ModuleDifference(Record):
    """The own operators of one `nn.Module` on two sides, forward and backward, per step and device as profiled."""

    name: str
    before_ns: float
    after_ns: float
    before_count: float
    """Kernels and copies that they launch; on a CPU calls."""
    after_count: float
    cause: str
    """Changes of what runs there that come with it."""

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns


class Comparison(Record):
    """Two runs, and what explains the difference. Changes are after less before.

    Everything is per step and device: the mean over the ranks of a run and their devices.
    """

    before: str
    after: str
    num_steps: tuple[int, int]
    step: Difference
    categories: tuple[Difference, ...]
    """The largest change first; the changes sum to the step's."""
    measured: Difference | None = None
    """The step without the profiler, with its interval by the windows of both trials; as the study states it where it
    states the speeds of both configurations.
    """
    stated: Interval | None = None
    """Interval of the ratio of speeds, where a study states it."""
    stated_how: str = ""
    """Method of its measurement; empty where no study states it."""
    trusted: bool = True
    """Both profiles can be trusted; else the difference of categories is no verdict."""
    kernels: tuple[KernelDifference, ...] = ()
    """The largest change first."""
    gaps: tuple[GapDifference, ...] = ()
    modules: tuple[ModuleDifference, ...] = ()
    """Available where both traces have call stacks."""
    notes: tuple[str, ...] = ()
