"""From a trace to a breakdown: every nanosecond of the profiled steps in one category.

On a device: what the device does, first compute, then communication and copies that compute does not
hide; where it does nothing, a gap, cut at the call that launched the next operation. Before the call
the host was late, and the gap is blamed on what the launching thread was doing; after it, the usual
launch latency, and beyond that the operation was queued but blocked.

On a CPU: the innermost operator on the thread that runs the steps. The sum of the categories is the
window, asserted in integers.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from tuner.profiling.categories import (
    COMPUTE,
    HOST_CATEGORIES,
    PRIORITY,
    Category,
    classify_copy,
    classify_kernel,
    classify_operator,
)
from tuner.profiling.intervals import Ints, cover, union_length
from tuner.profiling.steps import StepWindows, find_steps
from tuner.profiling.trace import Kind, Trace
from tuner.records import Breakdown, CaptureQuality

LOADER = r"(DataLoader|DataPipe).*(__next__|#)|^enumerate\(DataLoader\)|^steptune\.data_wait$"
OPTIMIZER = r"^Optimizer\.(step|zero_grad)#|^optimizer\.|^steptune\.optimizer$"
RESTART = r"^steptune\.epoch_restart$"
SYNC_CALLS = r"(Device|Stream|Event)Synchronize|^(cuda|hip)Memcpy$|StreamWaitEvent$"
ALLOCATION_CALLS = r"^(cuda|hip)(Malloc|Free|HostAlloc|HostRegister|MallocAsync|MemCreate|MemMap)"
BLOCKING_OPERATORS = r"^aten::(item|_local_scalar_dense|nonzero|is_nonzero)$"
MAX_UNLINKED = 0.05
MAX_MISSING = 0.01
MAX_OVERHEAD = 3.0
"""Launch-bound steps take 1.5 to 2.5 times as long under the profiler; host categories are scaled back."""
TOP_OPERATORS = 40


def analyse(trace: Trace, unprofiled_step_time_ns: int | None = None) -> tuple[Breakdown, ...]:
    """One breakdown per device in the trace (one for the CPU where there is no device work)."""
    steps = find_steps(trace)
    devices = np.unique(trace.device[trace.indices(Kind.KERNEL, Kind.COPY)])
    if len(devices) == 0:
        totals, overlapped, quality = _cpu_breakdown(trace, steps)
        names = [("cpu", totals, overlapped, quality)]
    else:
        names = [(f"cuda:{device}", *_device_breakdown(trace, steps, int(device))) for device in devices]
    return tuple(
        _finish(trace, steps, device, totals, overlapped, quality, unprofiled_step_time_ns)
        for device, totals, overlapped, quality in names
    )


def rescale(
    categories: dict[str, int], num_steps: int, unprofiled_step_time_ns: int, *, on_cpu: bool
) -> dict[str, int]:
    """Categories per step whose sum is the unprofiled step time.

    The profiler makes the host slower and leaves kernels almost alone. So on a device the host
    categories give up the excess; on a CPU, where every operator is recorded by the host, all
    categories but the wait for data do. Where the profiled steps were the faster ones, all
    categories grow alike. A stretch without length has nothing to scale.
    """
    per_step = {name: value / num_steps for name, value in categories.items()}
    total = sum(per_step.values())
    if not total:
        return {}
    excess = total - unprofiled_step_time_ns
    if on_cpu:
        shrinkable = {n for n in per_step if n not in (Category.DATA_WAIT, Category.EPOCH_RESTART)}
    else:
        shrinkable = {n for n in per_step if n in HOST_CATEGORIES}
    available = sum(per_step[name] for name in shrinkable)
    if excess <= 0 or available < excess:
        shrinkable, available = set(per_step), total
    factor = 1 - excess / available
    scaled = {n: v * factor if n in shrinkable else v for n, v in per_step.items()}
    return _rounded(scaled, unprofiled_step_time_ns)


def with_epoch_restart(breakdown: Breakdown, restart_ns_per_step: int) -> Breakdown:
    """Adds the cost of starting an epoch, spread over its steps, to the rescaled step."""
    if not breakdown.rescaled:
        return breakdown
    rescaled = dict(breakdown.rescaled)
    rescaled[Category.EPOCH_RESTART.value] = rescaled.get(Category.EPOCH_RESTART.value, 0) + restart_ns_per_step
    return msgspec.structs.replace(breakdown, rescaled=rescaled)


def _rounded(values: dict[str, float], total: int) -> dict[str, int]:
    """Integers that sum to `total`, by largest remainders."""
    whole = {name: int(value) for name, value in values.items()}
    missing = total - sum(whole.values())
    by_remainder = sorted(values, key=lambda name: whole[name] - values[name])
    step = 1 if missing > 0 else -1
    position = 0
    while missing != 0 and by_remainder:
        name = by_remainder[position % len(by_remainder)]
        if whole[name] + step >= 0:
            whole[name] += step
            missing -= step
        position += 1
    return whole


def _finish(
    trace: Trace,
    steps: StepWindows,
    device: str,
    totals: dict[str, int],
    overlapped: dict[str, int],
    quality: CaptureQuality,
    unprofiled: int | None,
) -> Breakdown:
    low, high = steps.span
    profiled_per_step = (high - low) / len(steps.windows)
    ratio = profiled_per_step / unprofiled if unprofiled else 1.0
    problems = list(quality.problems)
    if ratio > MAX_OVERHEAD:
        problems.append(f"the profiler made the step {ratio:.2f} times as long")
    quality = CaptureQuality(
        num_events=quality.num_events,
        num_steps=len(steps.windows),
        unlinked_share=quality.unlinked_share,
        missing_share=quality.missing_share,
        overhead_ratio=ratio,
        problems=tuple(problems),
    )
    rescaled = rescale(totals, len(steps.windows), unprofiled, on_cpu=device == "cpu") if unprofiled else {}
    return Breakdown(
        rank=trace.rank,
        device=device,
        num_steps=len(steps.windows),
        step_time_ns=high - low,
        categories=totals,
        quality=quality,
        unprofiled_step_time_ns=unprofiled,
        rescaled=rescaled,
        overlapped=overlapped,
        operators=_top_names(trace, steps.span),
    )


def _top_names(trace: Trace, span: tuple[int, int]) -> tuple[str, ...]:
    chosen = trace.indices(Kind.OPERATOR, Kind.KERNEL)
    chosen = chosen[(trace.start[chosen] >= span[0]) & (trace.start[chosen] < span[1])]
    time: Counter[int] = Counter()
    for name, duration in zip(trace.name[chosen].tolist(), (trace.end - trace.start)[chosen].tolist(), strict=True):
        time[name] += duration
    return tuple(trace.names[name] for name, _ in time.most_common(TOP_OPERATORS))


# --- a CPU ------------------------------------------------------------------------------------


def _cpu_breakdown(trace: Trace, steps: StepWindows) -> tuple[dict[str, int], dict[str, int], CaptureQuality]:
    low, high = steps.span
    on_thread = trace.indices(Kind.OPERATOR, Kind.ANNOTATION)
    on_thread = on_thread[
        (trace.thread[on_thread] == steps.thread) & (trace.end[on_thread] > low) & (trace.start[on_thread] < high)
    ]
    classes = _cpu_classes(trace)
    totals = dict.fromkeys((c.value for c in Category), 0)
    cursor = low
    stack: list[tuple[int, Category]] = []
    host_time: list[tuple[int, int]] = []

    def advance(to: int) -> None:
        nonlocal cursor
        if to > cursor:
            category = stack[-1][1] if stack else Category.HOST
            totals[category.value] += to - cursor
            if category is Category.HOST:
                host_time.append((cursor, to))
            cursor = to

    for index in on_thread.tolist():
        start, end = int(trace.start[index]), min(int(trace.end[index]), high)
        while stack and stack[-1][0] <= start:
            advance(stack[-1][0])
            stack.pop()
        advance(min(max(start, low), high))
        outer = stack[-1][1] if stack else Category.HOST
        own = classes[trace.name[index]]
        sticky = outer in (Category.OPTIMIZER, Category.DATA_WAIT, Category.EPOCH_RESTART)
        # An operator cannot outlive the one around it; a clock that says so is cut.
        limit = min(end, stack[-1][0]) if stack else end
        stack.append((limit, outer if sticky or own is None else own))
    while stack:
        advance(stack[-1][0])
        stack.pop()
    advance(high)
    quality = CaptureQuality(num_events=len(trace), num_steps=len(steps.windows))
    return _with_waits(trace, steps, totals, np.array(host_time, dtype=np.int64).reshape(-1, 2)), {}, quality


def _cpu_classes(trace: Trace) -> list[Category | None]:
    """Class of each name on a CPU's stepping thread; None inherits from the operator around it."""
    classes: list[Category | None] = []
    for name in trace.names:
        if re.search(LOADER, name):
            classes.append(Category.DATA_WAIT)
        elif re.search(RESTART, name):
            classes.append(Category.EPOCH_RESTART)
        elif re.search(OPTIMIZER, name):
            classes.append(Category.OPTIMIZER)
        elif name.startswith("ProfilerStep#"):
            classes.append(Category.HOST)
        else:
            classes.append(classify_operator(name) or (Category.OTHER_COMPUTE if name.startswith("aten::") else None))
    return classes


def _with_waits(trace: Trace, steps: StepWindows, totals: dict[str, int], host_time: Ints) -> dict[str, int]:
    """Host time in which another thread's collective was running counts as exposed communication.

    Time inside operators that only dispatch others (autograd's) stays the host's.
    """
    collectives = trace.matching(r"^(gloo|nccl):", Kind.ANNOTATION, Kind.OPERATOR)
    if len(collectives) == 0:
        return totals
    operators = trace.indices(Kind.OPERATOR)
    operators = operators[trace.thread[operators] == steps.thread]
    busy = (trace.start[operators], trace.end[operators])
    waits = (trace.start[collectives], trace.end[collectives])
    starts, ends, owner = cover(steps.span, [busy, waits])
    starts, ends = starts[owner == 1], ends[owner == 1]
    joint = union_length(np.concatenate([starts, host_time[:, 0]]), np.concatenate([ends, host_time[:, 1]]))
    moved = int((ends - starts).sum() + (host_time[:, 1] - host_time[:, 0]).sum()) - joint
    return {
        **totals,
        Category.HOST.value: totals[Category.HOST.value] - moved,
        Category.COMMUNICATION.value: totals[Category.COMMUNICATION.value] + moved,
    }


# --- a device ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Launches:
    """Where each device operation of interest was launched: time and thread (-1: unknown)."""

    start: Ints
    thread: Ints


def _device_breakdown(
    trace: Trace, steps: StepWindows, device: int
) -> tuple[dict[str, int], dict[str, int], CaptureQuality]:
    span = steps.span
    work = trace.indices(Kind.KERNEL, Kind.COPY)
    work = work[(trace.device[work] == device) & (trace.end[work] > span[0]) & (trace.start[work] < span[1])]
    launches = _find_launches(trace, work)
    categories = _device_categories(trace, work, launches)
    order = sorted(Category, key=lambda category: PRIORITY[category])
    members = {category: work[categories == PRIORITY[category]] for category in order}
    busy = [category for category in order if len(members[category])]
    starts, ends, owner = cover(span, [(trace.start[members[c]], trace.end[members[c]]) for c in busy])
    totals = dict.fromkeys((c.value for c in Category), 0)
    for number, category in enumerate(busy):
        totals[category.value] = int((ends - starts)[owner == number].sum())
    latency = _launch_latency(trace, work, launches)
    blame = _Blame(trace, span)
    for start, end in zip(starts[owner == -1].tolist(), ends[owner == -1].tolist(), strict=True):
        for category, length in _gap(trace, work, launches, blame, latency, start, end):
            totals[category.value] += length
    overlapped = _overlapped(trace, span, members)
    return totals, overlapped, _device_quality(trace, steps, work, launches)


def _find_launches(trace: Trace, work: Ints) -> _Launches:
    runtime = trace.indices(Kind.RUNTIME)
    position = dict(zip(trace.correlation[runtime].tolist(), runtime.tolist(), strict=True))
    found = np.array([position.get(c, -1) if c >= 0 else -1 for c in trace.correlation[work].tolist()], dtype=np.int64)
    known = found >= 0
    start = np.where(known, trace.start[found], -1)
    thread = np.where(known, trace.thread[found], -1)
    return _Launches(start=start, thread=thread)


def _device_categories(trace: Trace, work: Ints, launches: _Launches) -> Ints:
    """Priority number of each device operation; work launched inside the optimizer is its own."""
    by_name = np.array([PRIORITY[classify_kernel(name)] for name in trace.names], dtype=np.int64)
    copies = np.array([PRIORITY[classify_copy(name)] for name in trace.names], dtype=np.int64)
    result = np.where(trace.kind[work] == Kind.COPY, copies[trace.name[work]], by_name[trace.name[work]])
    optimizer = trace.matching(OPTIMIZER, Kind.ANNOTATION, Kind.OPERATOR)
    compute = np.isin(result, [PRIORITY[c] for c in COMPUTE])
    for index in optimizer.tolist():
        inside = (
            (launches.start >= trace.start[index])
            & (launches.start < trace.end[index])
            & (launches.thread == trace.thread[index])
        )
        result[inside & compute] = PRIORITY[Category.OPTIMIZER]
    return result


def _launch_latency(trace: Trace, work: Ints, launches: _Launches) -> int:
    """Usual time from launch call to start when the queue was empty: the lower quartile, 5-30 us."""
    known = launches.start >= 0
    delays = (trace.start[work] - launches.start)[known]
    delays = delays[delays > 0]
    if len(delays) == 0:
        return 10_000
    return int(np.clip(np.quantile(delays, 0.25), 5_000, 30_000))


def _gap(
    trace: Trace, work: Ints, launches: _Launches, blame: _Blame, latency: int, start: int, end: int
) -> list[tuple[Category, int]]:
    """The pieces of one idle gap [start, end) of a device."""
    position = int(np.searchsorted(trace.start[work], end, side="left"))
    if position >= len(work) or trace.start[work[position]] != end:
        return blame.split(start, end, blame.main_thread)
    launch = int(launches.start[position])
    if launch < 0:
        return [(Category.UNKNOWN, end - start)]
    cut = min(max(launch, start), end)
    pieces = blame.split(start, cut, int(launches.thread[position]))
    latent = min(latency, end - cut)
    pieces.append((Category.LAUNCH_LATENCY, latent))
    pieces.append((Category.QUEUED, end - cut - latent))
    return [piece for piece in pieces if piece[1] > 0]


class _Blame:
    """What each host thread was doing, by priority: data, synchronisation, allocation, optimizer, host."""

    _ORDER = (
        Category.EPOCH_RESTART,
        Category.DATA_WAIT,
        Category.SYNCHRONISATION,
        Category.ALLOCATION,
        Category.OPTIMIZER_HOST,
    )

    def __init__(self, trace: Trace, span: tuple[int, int]) -> None:
        host = (Kind.ANNOTATION, Kind.OPERATOR)
        sync = np.concatenate([trace.matching(SYNC_CALLS, Kind.RUNTIME), trace.matching(BLOCKING_OPERATORS, *host)])
        self._trace = trace
        self._span = span
        self._sets = {
            Category.EPOCH_RESTART: trace.matching(RESTART, *host),
            Category.DATA_WAIT: trace.matching(LOADER, *host),
            Category.SYNCHRONISATION: sync,
            Category.ALLOCATION: trace.matching(ALLOCATION_CALLS, Kind.RUNTIME),
            Category.OPTIMIZER_HOST: trace.matching(OPTIMIZER, *host),
        }
        self._covers: dict[int, tuple[Ints, Ints, Ints]] = {}
        self.main_thread = find_steps(trace).thread

    def split(self, start: int, end: int, thread: int) -> list[tuple[Category, int]]:
        """Pieces of [start, end) by what `thread` was doing; what nothing covers is `host`."""
        if end <= start:
            return []
        starts, ends, owner = self._cover_of(thread)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(starts, end, side="left"))
        pieces = []
        for number in range(first, last):
            length = min(int(ends[number]), end) - max(int(starts[number]), start)
            category = Category.HOST if owner[number] < 0 else self._ORDER[owner[number]]
            pieces.append((category, length))
        return pieces

    def _cover_of(self, thread: int) -> tuple[Ints, Ints, Ints]:
        if thread not in self._covers:
            sets = []
            for category in self._ORDER:
                chosen = self._sets[category]
                chosen = chosen[self._trace.thread[chosen] == thread]
                sets.append((self._trace.start[chosen], self._trace.end[chosen]))
            self._covers[thread] = cover(self._span, sets)
        return self._covers[thread]


def _overlapped(trace: Trace, span: tuple[int, int], members: dict[Category, Ints]) -> dict[str, int]:
    """Communication and copies that run while compute does: reported beside the sum."""

    def length(*groups: Ints) -> int:
        chosen = np.concatenate(groups)
        return union_length(np.clip(trace.start[chosen], *span), np.clip(trace.end[chosen], *span))

    compute = np.concatenate([members[c] for c in (*COMPUTE, Category.OPTIMIZER)])
    result = {}
    for category in (Category.COMMUNICATION, Category.COPY_H2D, Category.COPY_D2H):
        own = members[category]
        if len(own):
            result[category.value] = length(own) + length(compute) - length(own, compute)
    return result


def _device_quality(trace: Trace, steps: StepWindows, work: Ints, launches: _Launches) -> CaptureQuality:
    unlinked = float((launches.start < 0).mean()) if len(work) else 0.0
    calls = trace.matching(r"LaunchKernel|^(cuda|hip)Memcpy.*Async|^cuLaunch", Kind.RUNTIME)
    calls = calls[(trace.start[calls] >= steps.span[0]) & (trace.start[calls] < steps.span[1])]
    device_correlations = trace.correlation[trace.indices(Kind.KERNEL, Kind.COPY)]
    missing = float((~np.isin(trace.correlation[calls], device_correlations)).mean()) if len(calls) else 0.0
    problems = []
    if unlinked > MAX_UNLINKED:
        problems.append(f"{unlinked:.0%} of the device work has no recorded launch")
    if missing > MAX_MISSING:
        problems.append(f"{missing:.0%} of the launches have no recorded device work")
    return CaptureQuality(
        num_events=len(trace),
        num_steps=len(steps.windows),
        unlinked_share=unlinked,
        missing_share=missing,
        problems=tuple(problems),
    )
