"""The time of one device, or of a CPU, as exclusive segments that tile the steps."""

from __future__ import annotations

from dataclasses import dataclass

from steptune.tuner.profiling.intervals import Ints

RUNTIME_COST = 5
"""Cost of recording a call of the runtime, in recorded operators: 2.9 us against 0.55 us on a quiet H100 host. On busy
ones benchmarks/overhead_correction.py gave anything from 1 to 20.
"""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Category of each moment.

    Attributes:
        start, end: int64, sorted; they tile the steps.
        category: `PRIORITY` number by segment.
        phases: Starts, ends and number of the phase (-1: nothing computes) of other segments that tile the same.
        overlapped: Nanoseconds by category that something hides: beside the sum.
        blocking: Nanoseconds of exposed communication that held compute up.
        num_recorded: int64 by category: events that the profiler recorded in it on the thread that counts; a call
            of the runtime counts as `RUNTIME_COST` of them.
    """

    start: Ints
    end: Ints
    category: Ints
    phases: tuple[Ints, Ints, Ints]
    overlapped: dict[str, int]
    blocking: dict[str, int]
    num_recorded: Ints
