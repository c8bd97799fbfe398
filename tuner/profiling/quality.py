"""Whether a capture can be believed.

Problems are what makes any verdict wrong: they gate the diagnosis, which then says "unknown" and why.
Notes are what a reader should know, but what changes no verdict.
"""

from __future__ import annotations

import numpy as np

from tuner.profiling.capture import Capture
from tuner.profiling.categories import COMPUTING, Category
from tuner.profiling.device_time import device_rows
from tuner.profiling.trace import Kind
from tuner.records import CaptureQuality
from tuner.wording import counted

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
MAX_FIRST_STEP = 1.5
LAUNCH_CALLS = r"LaunchKernel|GraphLaunch|^(cuda|hip)Memcpy.*Async|^(cu|hip)Launch"


def capture_quality(
    capture: Capture, device: str, totals: dict[str, int], unprofiled_step_time_ns: int | None
) -> CaptureQuality:
    """How far the capture of a device (or "cpu") can be believed."""
    trace, steps = capture.trace, capture.steps
    problems, notes = [], list(trace.losses)
    step_time_ns = int(steps.boundaries[-1] - steps.boundaries[0])
    unlinked = 0.0
    if device != "cpu":
        rows = device_rows(capture, int(device.removeprefix("cuda:")))
        unlinked = float((capture.launches.row[rows] < 0).mean()) if len(rows) else 0.0
    unknown = totals[Category.UNKNOWN.value] / max(1, step_time_ns)
    if unlinked > MAX_UNLINKED and unknown > MAX_UNKNOWN:
        problems.append(
            f"{unlinked:.0%} of the device work has no recorded launch, and the cause of {unknown:.0%} of the step "
            "is unknown for that reason"
        )
    elif unlinked > MAX_UNLINKED:
        notes.append(f"{unlinked:.0%} of the device work has no recorded launch")
    missing = _missing(capture)
    if missing > MAX_MISSING:
        problems.append(f"{missing:.0%} of the launches have no recorded device work")
    if not trace.is_whole:
        problems.append("the file is incomplete: what the devices did may be missing")
    ratio = step_time_ns / len(steps) / unprofiled_step_time_ns if unprofiled_step_time_ns else 1.0
    if ratio < MIN_OVERHEAD:
        problems.append(
            f"the step time given without the profiler is {1 / ratio:.3g} times that of the profiled steps: it is not "
            "of the same steps"
        )
    if ratio > MAX_OVERHEAD:
        problems.append(f"the profiler made the step {ratio:.2f} times as long")
    computing = sum(totals[category.value] for category in COMPUTING) / len(steps)
    if device != "cpu" and unprofiled_step_time_ns and computing > MAX_COMPUTE * unprofiled_step_time_ns:
        problems.append(
            f"the step time given without the profiler is shorter than what the device computes ({computing / 1e6:.3g} "
            "ms): it is not of the same steps"
        )
    notes += _about_steps(capture)
    return CaptureQuality(
        num_events=trace.num_events,
        num_steps=len(steps),
        unlinked_share=unlinked,
        missing_share=missing,
        overhead_ratio=ratio,
        problems=tuple(problems),
        notes=tuple(notes),
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
    lengths = np.diff(steps.boundaries)
    usual = np.median(lengths[1:]) if len(lengths) >= 3 else 0
    if usual > 0 and lengths[0] > MAX_FIRST_STEP * usual:
        notes.append(
            f"the first step took {lengths[0] / usual:.1f} times as long as the others: warm up longer before profiling"
        )
    return notes
