"""The clock by which a worker measures its lease."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Return monotonic seconds that include the time for which the machine is suspended, as the lease does; Python's
    monotonic clock does not.
    """
    return time.clock_gettime(_CLOCK)
