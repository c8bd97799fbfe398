"""Time of one device, or of a CPU, during the steps, as non-overlapping segments."""

from __future__ import annotations

from dataclasses import dataclass

from steptune.tuner.profiling.intervals import Ints

RUNTIME_COST = 5
"""Cost of recording a runtime call, as a multiple of the cost of recording an operator: 2.9 us against 0.55 us on a
quiet H100 host. On busy hosts benchmarks/overhead_correction.py gave anything from 1 to 20.
"""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Non-overlapping segments of a device's time during the steps, each with one category.

    Attributes:
        start, end: int64, sorted; they tile the steps.
        category: `PRIORITY` number by segment.
        phases: Starts, ends and phase numbers (-1: nothing computes) of a second set of segments that tile the steps.
        overlapped: Overlapped nanoseconds by category, not part of the sum.
        blocking: Nanoseconds of exposed communication that delayed compute, by category.
        num_recorded: int64 by category: events recorded in it on the responsible thread; a call
            of the runtime counts as `RUNTIME_COST` of them.
    """

    start: Ints
    end: Ints
    category: Ints
    phases: tuple[Ints, Ints, Ints]
    overlapped: dict[str, int]
    blocking: dict[str, int]
    num_recorded: Ints
