"""The clock by which a worker holds its lease."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Seconds that only grow. They go on while the machine is suspended, as the lease does; Python's monotonic clock
    stands still then.
    """
    return time.clock_gettime(_CLOCK)
