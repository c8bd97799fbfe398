"""Quality of a capture: whether its breakdown can be trusted.

Problems would make any verdict wrong: the diagnosis then says "unknown" with the reason.
Notes inform the reader and change no verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from steptune.tuner.costs.categories import COMPUTING, Category
from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.device_time import device_rows
from steptune.tuner.profiling.facts import is_own
from steptune.tuner.profiling.intervals import Ints, median
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.records import CaptureQuality
from steptune.tuner.wording import counted

MAX_UNLINKED = 0.05
MAX_UNKNOWN = 0.05
"""Maximum share of the step's time whose cause is unknown because launches were not recorded."""
MAX_MISSING = 0.01
MAX_EMPTY = 0.1
"""Maximum share of the steps that have no device work although other steps have some."""
MAX_OVERHEAD = 3.0
"""Maximum ratio of profiled to unprofiled step time: launch-bound steps take 1.5 to 2.5 times as long under the
profiler, and host categories are scaled back.
"""
MIN_OVERHEAD = 0.5
"""Minimum ratio of profiled to unprofiled step time: no profiler halves a step."""
MAX_COMPUTE = 1.1
"""Maximum ratio of kernel time to unprofiled step time: the profiler does not slow kernels, so only chance raises this
ratio above 1.
"""
SLOW_FIRST_STEP = 1.5
MAX_WARM_UP = 0.25
"""Maximum excess of the first step over the others, as a share of the profiled time: above it, too much of the profile
is warm-up.
"""
WHOLE_REPLAY = 0.8
"""Minimum number of operations of a complete CUDA graph replay, as a share of the number in the graph's other replays.
A replay with fewer operations has lost some; conditional nodes vary less.
"""
LAUNCH_CALLS = r"LaunchKernel|GraphLaunch|^(cuda|hip)Memcpy.*Async|^(cu|hip)Launch"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Properties of a capture that determine its quality.

    Attributes:
        unlinked: Share of the device's operations without a recorded launch.
        unknown: Share of the steps whose cause is unknown.
        missing: Share of the launched operations without recorded device work: a replayed graph launches many.
        lost_replays, num_replays: Number of CUDA graph replays with missing operations, and of all replays.
        empty_steps, num_steps: Number of steps without device work although others have some, and of all steps.
        step_time_ns, computing_ns: Profiled step time, and the part in which the device computes (0 on a CPU).
        unprofiled_step_time_ns: Step time without the profiler; None if unknown.
        own_capture: True if Steptune recorded it, with its own profiler settings.
        first_step: Time of the first step as a multiple of the others' (1.0 if unknown).
        warm_up: Excess of the first step over the others, as a share of all steps.
    """

    is_whole: bool
    unlinked: float
    unknown: float
    missing: float
    lost_replays: int
    num_replays: int
    empty_steps: int
    num_steps: int
    step_time_ns: float
    computing_ns: float
    unprofiled_step_time_ns: int | None
    own_capture: bool
    first_step: float
    warm_up: float

    @property
    def overhead_ratio(self) -> float:
        return self.step_time_ns / self.unprofiled_step_time_ns if self.unprofiled_step_time_ns else 1.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Problem of a capture that rules out any verdict from it.

    Attributes:
        when: Condition as text shown to users.
        holds: Condition as a function.
        message: Text shown to users, made from the fields of `Seen`.
        advice: Advice on a better capture, for captures that another program recorded.
        own_advice: Advice for captures that Steptune recorded itself, whose settings the user does not choose.
    """

    name: str
    when: str
    holds: Callable[[Seen], bool]
    message: Callable[[Seen], str]
    advice: str
    own_advice: str


AGAIN = "run it again; measured rates do not depend on the profile"
PROBLEMS: tuple[Problem, ...] = (
    Problem(
        name="unlinked",
        when=f"more than {MAX_UNLINKED:.0%} of the device work has no recorded launch, which leaves the cause of "
        f"more than {MAX_UNKNOWN:.0%} of the step unknown",
        holds=lambda seen: seen.unlinked > MAX_UNLINKED and seen.unknown > MAX_UNKNOWN,
        message=lambda seen: (
            f"{seen.unlinked:.0%} of the device work has no recorded launch, which leaves the cause of "
            f"{seen.unknown:.0%} of the step unknown"
        ),
        advice="record ProfilerActivity.CPU together with the device's activity, and give the profiler's schedule a "
        "warm-up step, so that all work in the first recorded step was launched under the profiler",
        own_advice=AGAIN,
    ),
    Problem(
        name="missing",
        when=f"more than {MAX_MISSING:.0%} of the launched operations have no recorded device work (a replayed "
        f"CUDA graph counts as many operations as its other replays), or more than {MAX_EMPTY:.0%} of the "
        "steps show no device work",
        holds=lambda seen: seen.missing > MAX_MISSING or seen.empty_steps > MAX_EMPTY * seen.num_steps,
        message=lambda seen: _what_is_missing(seen),
        advice="profile fewer steps, in the first profiler session of a fresh process and with a warm-up step in "
        "its schedule; record the device's activity, and let no other profiler use the device",
        own_advice=f"end other profilers that use the device, and {AGAIN}",
    ),
    Problem(
        name="cut_file",
        when="the file is truncated or damaged",
        holds=lambda seen: not seen.is_whole,
        message=lambda seen: "the file is incomplete: device work may be missing",
        advice="copy or record the trace again: keep the process running until the profiler has written the whole "
        "file, on a disk with enough free space",
        own_advice=f"free space on the disk for temporary files, and {AGAIN}",
    ),
    Problem(
        name="wrong_step_time",
        when=f"the step time that was given as unprofiled is more than {1 / MIN_OVERHEAD:g} times the profiled step "
        "time, or shorter than the compute time of a profiled step",
        holds=lambda seen: seen.overhead_ratio < MIN_OVERHEAD or _computes_too_long(seen),
        message=lambda seen: (
            "the step time that was given as unprofiled is "
            + (
                (
                    f"shorter than the compute time of a profiled step ({seen.computing_ns / 1e6:.3g} ms): it was "
                    "measured on other steps"
                )
                if _computes_too_long(seen)
                else f"{1 / seen.overhead_ratio:.3g} times the profiled step time: it was measured on other steps"
            )
        ),
        advice="measure the step time again without the profiler, in milliseconds: take the mean over steps with "
        "the same model and batch on the same device, and synchronise the device before and after them",
        own_advice=(
            "run it again on a quiet machine: the profiled steps and the timed windows disagree on the step time"
        ),
    ),
    Problem(
        name="overhead",
        when=f"the profiler made the step more than {MAX_OVERHEAD:g} times as long",
        holds=lambda seen: seen.overhead_ratio > MAX_OVERHEAD and not _computes_too_long(seen),
        message=lambda seen: f"the profiler made the step {seen.overhead_ratio:.2f} times as long",
        advice="record less: without with_stack, record_shapes and profile_memory",
        own_advice="profile it with a larger batch: the profiler's overhead dominates such a short step; measured "
        "rates do not depend on the profile",
    ),
    Problem(
        name="warm_up",
        when=f"the extra time of the first step is more than {MAX_WARM_UP:.0%} of all profiled time",
        holds=lambda seen: seen.warm_up > MAX_WARM_UP,
        message=lambda seen: (
            f"the first step took {seen.first_step:.1f} times as long as the others, so {seen.warm_up:.0%} of the "
            "profiled time is warm-up"
        ),
        advice="warm up longer before profiling, until the step time is steady: compilation, autotuning, the allocator "
        "and the loader's first batches are not part of a typical step",
        own_advice=AGAIN,
    ),
)


def _what_is_missing(seen: Seen) -> str:
    if seen.lost_replays:
        replays = f"{seen.lost_replays} of {counted(seen.num_replays, 'replay')} of CUDA graphs"
        return f"{replays} lack a part of their device work in the trace"
    if seen.missing > MAX_MISSING:
        return f"{seen.missing:.0%} of the launches have no recorded device work"
    return f"{seen.empty_steps} of {counted(seen.num_steps, 'step')} show no device work"


def _computes_too_long(seen: Seen) -> bool:
    return seen.unprofiled_step_time_ns is not None and seen.computing_ns > MAX_COMPUTE * seen.unprofiled_step_time_ns


def capture_quality(
    capture: Capture, device: str, totals: dict[str, int], unprofiled_step_time_ns: int | None
) -> CaptureQuality:
    """Return the quality of a capture, judged for one device (or "cpu")."""
    seen = _seen(capture, device, totals, unprofiled_step_time_ns)
    bad = [problem for problem in PROBLEMS if problem.holds(seen)]
    names = tuple(problem.name for problem in bad)
    notes = list(capture.trace.losses)
    if seen.unlinked > MAX_UNLINKED and "unlinked" not in names:
        notes.append(f"{seen.unlinked:.0%} of the device work has no recorded launch")
    notes += _about_steps(capture)
    if seen.first_step > SLOW_FIRST_STEP and "warm_up" not in names:
        longer = "" if seen.own_capture else ": warm up longer before profiling"
        notes.append(f"the first step took {seen.first_step:.1f} times as long as the others{longer}")
    return CaptureQuality(
        num_events=capture.trace.num_events,
        num_steps=len(capture.steps),
        unlinked_share=seen.unlinked,
        missing_share=seen.missing,
        overhead_ratio=seen.overhead_ratio,
        problems=tuple(problem.message(seen) for problem in bad),
        problem_names=names,
        notes=tuple(notes),
    )


def _seen(capture: Capture, device: str, totals: dict[str, int], unprofiled_step_time_ns: int | None) -> Seen:
    steps, on_cpu = capture.steps, device == "cpu"
    step_time_ns = int(steps.boundaries[-1] - steps.boundaries[0])
    rows = np.empty(0, np.int64) if on_cpu else device_rows(capture, int(device.removeprefix("cuda:")))
    lengths = np.diff(steps.boundaries)
    usual = median(lengths[1:]) if len(lengths) >= 3 else 0.0
    missing, lost, replays = _missing(capture)
    computing = 0 if on_cpu else sum(totals[category.value] for category in COMPUTING)
    return Seen(
        is_whole=capture.trace.is_whole,
        unlinked=float((capture.launches.row[rows] < 0).mean()) if len(rows) else 0.0,
        unknown=totals[Category.UNKNOWN.value] / max(1, step_time_ns),
        missing=missing,
        lost_replays=lost,
        num_replays=replays,
        empty_steps=0 if on_cpu else _empty_steps(capture),
        num_steps=len(steps),
        step_time_ns=step_time_ns / len(steps),
        computing_ns=computing / len(steps),
        unprofiled_step_time_ns=unprofiled_step_time_ns or None,
        own_capture=is_own(capture.trace),
        first_step=float(lengths[0]) / usual if usual else 1.0,
        warm_up=max(0.0, float(lengths[0]) - usual) / max(1, step_time_ns) if usual else 0.0,
    )


def _missing(capture: Capture) -> tuple[float, int, int]:
    """Return the share of operations missing from the trace, among those launched inside the steps, and two counts:
    graph replays that lost operations, and all graph replays.
    """
    trace, (low, high) = capture.trace, capture.steps.span
    calls = trace.host_rows(LAUNCH_CALLS, Kind.RUNTIME)
    calls = calls[(trace.host.start[calls] >= low) & (trace.host.start[calls] < high)]
    if len(calls) == 0:
        return 0.0, 0, 0
    # A call around another one (the runtime's around the driver's) has its device work by the same correlation.
    works, position = np.unique(trace.work.correlation[trace.work.kind != Kind.SYNC], return_counts=True)
    place = np.minimum(np.searchsorted(works, trace.host.correlation[calls]), max(0, len(works) - 1))
    found = np.zeros(len(calls), dtype=np.int64)
    if len(works):
        found = np.where((works[place] == trace.host.correlation[calls]) & (works[place] >= 0), position[place], 0)
    replay = trace.names_matching(r"GraphLaunch")[trace.host.name[calls]]
    expected = np.ones(len(calls), dtype=np.int64)
    expected[replay] = _expected_of_replays(capture, trace.host.start[calls[replay]], found[replay])
    lacking = np.where(replay, found < WHOLE_REPLAY * expected, found == 0)
    lost_operations = np.where(lacking, np.maximum(expected - found, 1), 0)
    return float(lost_operations.sum() / expected.sum()), int((lacking & replay).sum()), int(replay.sum())


def _expected_of_replays(capture: Capture, start: Ints, found: Ints) -> Ints:
    """Return the expected number of operations of each graph replay: the largest number at the same position in any
    step.

    If steps replay different numbers of graphs, it is unknown which replays correspond: a replay without any operation
    counts as many as the median of the others.
    """
    step = np.searchsorted(capture.steps.host_starts, start, side="right") - 1
    numbers, counts = np.unique(step, return_counts=True)
    if len(numbers) > 1 and (counts == counts[0]).all():
        place = np.arange(len(start)) % counts[0]
        largest = np.zeros(counts[0], dtype=np.int64)
        np.maximum.at(largest, place, found)
        expected = largest[place]
    else:
        usual = int(median(found[found > 0])) if (found > 0).any() else 1
        expected = np.where(found > 0, found, usual)
    result: Ints = np.maximum(expected, 1)
    return result


def _empty_steps(capture: Capture) -> int:
    """Return the number of steps without any device work, if others have some."""
    steps, work = capture.steps, capture.trace.work
    rows = capture.trace.work_rows()
    first = np.searchsorted(steps.boundaries, work.start[rows], side="right") - 1
    last = np.searchsorted(steps.boundaries, work.end[rows], side="left") - 1
    busy = np.zeros(len(steps) + 1, dtype=np.int64)
    np.add.at(busy, np.clip(first, 0, len(steps)), 1)
    np.add.at(busy, np.clip(last + 1, 0, len(steps)), -1)
    worked = np.cumsum(busy[: len(steps)]) > 0
    return int((~worked).sum()) if worked.any() else 0


def _about_steps(capture: Capture) -> list[str]:
    steps = capture.steps
    notes = []
    if not steps.marked:
        notes.append(
            "no step is marked (no ProfilerStep#N): the whole trace counts as one step; call prof.step() in the loop"
        )
    if steps.cut_by:
        notes.append(
            f"no step is marked (no ProfilerStep#N): a step reaches from one {steps.cut_by} to the next; call "
            "prof.step() in the loop to mark it"
        )
    if steps.num_ignored:
        notes.append(
            f"{counted(steps.num_ignored, 'step mark')} ignored: from a thread other than the one that launches the "
            "work, around other marks, or with zero length"
        )
    if steps.num_dropped:
        notes.append(f"{counted(steps.num_dropped, 'incomplete step')} at the end left out")
    return notes
