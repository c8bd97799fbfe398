"""Whether a capture can be believed.

Problems are what makes any verdict wrong: they gate the diagnosis, which then says "unknown" and why.
Notes are what a reader should know, but what changes no verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from steptune.tuner.profiling.capture import Capture
from steptune.tuner.profiling.categories import COMPUTING, Category
from steptune.tuner.profiling.device_time import device_rows
from steptune.tuner.profiling.trace import Kind
from steptune.tuner.records import CaptureQuality
from steptune.tuner.wording import counted

MAX_UNLINKED = 0.05
MAX_UNKNOWN = 0.05
"""Share of the step whose cause may be unknown because its launches were not recorded."""
MAX_MISSING = 0.01
MAX_OVERHEAD = 3.0
"""Launch-bound steps take 1.5 to 2.5 times as long under the profiler; host categories are scaled back."""
MIN_OVERHEAD = 0.5
"""No profiler makes a step half as long."""
MAX_COMPUTE = 1.1
"""Kernels are not slowed by the profiler: they cannot take longer than the step without it, but for chance."""
SLOW_FIRST_STEP = 1.5
MAX_WARM_UP = 0.25
"""Share of the profiled time that the first step may take beyond what the others do: above it, warming up is a large
part of what was profiled."""
LAUNCH_CALLS = r"LaunchKernel|GraphLaunch|^(cuda|hip)Memcpy.*Async|^(cu|hip)Launch"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a capture shows of itself.

    Attributes:
        unlinked: Share of the device's operations without a recorded launch.
        unknown: Share of the steps whose cause is unknown.
        missing: Share of the launches without recorded device work.
        step_time_ns, computing_ns: Per step as profiled, and of that what the device computes (0 on a CPU).
        unprofiled_step_time_ns: As given.
        first_step: How many times as long as the others the first step took (1.0 where that cannot be said).
        warm_up: What it took beyond the others, as a share of all steps.
    """

    is_whole: bool
    unlinked: float
    unknown: float
    missing: float
    step_time_ns: float
    computing_ns: float
    unprofiled_step_time_ns: int | None
    first_step: float
    warm_up: float

    @property
    def overhead_ratio(self) -> float:
        return self.step_time_ns / self.unprofiled_step_time_ns if self.unprofiled_step_time_ns else 1.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One way in which a capture is so bad that no verdict can rest on it.

    Attributes:
        when: For people: the condition.
        holds: The condition.
        message: What is said; the fields of `Seen` are filled in.
        advice: How to get a better capture: it fits this problem only.
    """

    name: str
    when: str
    holds: Callable[[Seen], bool]
    message: Callable[[Seen], str]
    advice: str


PROBLEMS: tuple[Problem, ...] = (
    Problem(
        name="unlinked",
        when=f"more than {MAX_UNLINKED:.0%} of the device work has no recorded launch, and the cause of more than "
        f"{MAX_UNKNOWN:.0%} of the step is unknown for that reason",
        holds=lambda seen: seen.unlinked > MAX_UNLINKED and seen.unknown > MAX_UNKNOWN,
        message=lambda seen: (
            f"{seen.unlinked:.0%} of the device work has no recorded launch, and the cause of "
            f"{seen.unknown:.0%} of the step is unknown for that reason"
        ),
        advice="record ProfilerActivity.CPU beside the device's, and let the profiler's schedule warm up for a step, "
        "so that what runs in the first step was launched under the profiler too",
    ),
    Problem(
        name="missing",
        when=f"more than {MAX_MISSING:.0%} of the launches have no recorded device work",
        holds=lambda seen: seen.missing > MAX_MISSING,
        message=lambda seen: f"{seen.missing:.0%} of the launches have no recorded device work",
        advice="profile fewer steps, in the first profiler session of a fresh process and with a warm-up step in its "
        "schedule; record the device's activity, and let no other profiler use the device",
    ),
    Problem(
        name="cut_file",
        when="the file ends in the middle or is damaged",
        holds=lambda seen: not seen.is_whole,
        message=lambda seen: "the file is incomplete: what the devices did may be missing",
        advice="copy the trace again, or write it again: let the process live until the profiler has written all of "
        "it, on a disk with room",
    ),
    Problem(
        name="wrong_step_time",
        when="the step time given without the profiler is more than "
        f"{1 / MIN_OVERHEAD:g} times that of the profiled steps, or shorter than what the device computes in them",
        holds=lambda seen: seen.overhead_ratio < MIN_OVERHEAD or _computes_too_long(seen),
        message=lambda seen: (
            "the step time given without the profiler is "
            + (
                f"shorter than what the device computes ({seen.computing_ns / 1e6:.3g} ms): it is not of the same steps"
                if _computes_too_long(seen)
                else f"{1 / seen.overhead_ratio:.3g} times that of the profiled steps: it is not of the same steps"
            )
        ),
        advice="measure the step again without the profiler: the mean of steps with the same model and batch on the "
        "same device, in milliseconds of one step, the device synchronised before and after",
    ),
    Problem(
        name="overhead",
        when=f"the profiler made the step more than {MAX_OVERHEAD:g} times as long",
        holds=lambda seen: seen.overhead_ratio > MAX_OVERHEAD and not _computes_too_long(seen),
        message=lambda seen: f"the profiler made the step {seen.overhead_ratio:.2f} times as long",
        advice="record less: without with_stack, record_shapes and profile_memory",
    ),
    Problem(
        name="warm_up",
        when=f"what the first step takes beyond the others is more than {MAX_WARM_UP:.0%} of all profiled time",
        holds=lambda seen: seen.warm_up > MAX_WARM_UP,
        message=lambda seen: (
            f"the first step took {seen.first_step:.1f} times as long as the others, so that "
            f"{seen.warm_up:.0%} of the profiled time is warming up"
        ),
        advice="warm up longer before profiling, until the step time is steady: compilation, autotuning, the allocator "
        "and the loader's first batches belong to no usual step",
    ),
)


def _computes_too_long(seen: Seen) -> bool:
    return seen.unprofiled_step_time_ns is not None and seen.computing_ns > MAX_COMPUTE * seen.unprofiled_step_time_ns


def capture_quality(
    capture: Capture, device: str, totals: dict[str, int], unprofiled_step_time_ns: int | None
) -> CaptureQuality:
    """How far the capture of a device (or "cpu") can be believed."""
    seen = _seen(capture, device, totals, unprofiled_step_time_ns)
    bad = [problem for problem in PROBLEMS if problem.holds(seen)]
    names = tuple(problem.name for problem in bad)
    notes = list(capture.trace.losses)
    if seen.unlinked > MAX_UNLINKED and "unlinked" not in names:
        notes.append(f"{seen.unlinked:.0%} of the device work has no recorded launch")
    notes += _about_steps(capture)
    if seen.first_step > SLOW_FIRST_STEP and "warm_up" not in names:
        notes.append(
            f"the first step took {seen.first_step:.1f} times as long as the others: warm up longer before profiling"
        )
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
    usual = float(np.median(lengths[1:])) if len(lengths) >= 3 else 0.0
    computing = 0 if on_cpu else sum(totals[category.value] for category in COMPUTING)
    return Seen(
        is_whole=capture.trace.is_whole,
        unlinked=float((capture.launches.row[rows] < 0).mean()) if len(rows) else 0.0,
        unknown=totals[Category.UNKNOWN.value] / max(1, step_time_ns),
        missing=_missing(capture),
        step_time_ns=step_time_ns / len(steps),
        computing_ns=computing / len(steps),
        unprofiled_step_time_ns=unprofiled_step_time_ns or None,
        first_step=float(lengths[0]) / usual if usual else 1.0,
        warm_up=max(0.0, float(lengths[0]) - usual) / max(1, step_time_ns) if usual else 0.0,
    )


def _missing(capture: Capture) -> float:
    """Share of launch calls inside the steps whose device work is not in the trace."""
    trace, (low, high) = capture.trace, capture.steps.span
    calls = trace.host_rows(LAUNCH_CALLS, Kind.RUNTIME)
    calls = calls[(trace.host.start[calls] >= low) & (trace.host.start[calls] < high)]
    if len(calls) == 0:
        return 0.0
    launched = np.zeros(len(trace.host), dtype=bool)
    launched[capture.launches.row[capture.launches.row >= 0]] = True
    # A call around another one (the runtime's around the driver's) has its device work by the same correlation.
    with_work = launched[calls] | np.isin(trace.host.correlation[calls], trace.work.correlation)
    return float((~with_work).mean())


def _about_steps(capture: Capture) -> list[str]:
    steps = capture.steps
    notes = []
    if not steps.marked:
        notes.append(
            "no step is marked (no ProfilerStep#N): all of the trace counts as one step; call prof.step() in the loop"
        )
    if steps.num_ignored:
        notes.append(
            f"{counted(steps.num_ignored, 'mark')} of steps ignored: of other threads than the one that launches the "
            "work, around other marks, or without length"
        )
    if steps.num_dropped:
        notes.append(f"{counted(steps.num_dropped, 'incomplete step')} at the end left out")
    return notes
