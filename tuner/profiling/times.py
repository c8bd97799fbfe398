"""Times of events: exact conversion from microseconds in a file to integer nanoseconds.

`ts` and `dur` are microseconds: integers before torch 2.3, three decimals since. Times before that were counted
from 1970, beyond a float's nanosecond precision: those are read from the text.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from steptune.tuner.errors import SteptuneError
from steptune.tuner.profiling.trace import Ints

FLOAT_HAS_NANOSECONDS_US = 2**43
"""Time in microseconds above which adjacent floats differ by more than two nanoseconds."""
NO_TIME = np.iinfo(np.int64).min
FEW = 1000
"""Minimum number of times without decimals from which to conclude that no decimals were recorded: among fewer times,
all decimals may have been rounded away.
"""
LARGEST_US = 2**62 / 1000
"""Maximum start or duration (146 years) in microseconds: the sum of two fits into an int64 of nanoseconds."""


class InexactTimesError(SteptuneError):
    """Error for times with decimals that a float of their size cannot hold; they have to be read from the text."""


def times(events: list[Any], exact: bool) -> tuple[Ints, Ints]:
    """Return starts and ends in nanoseconds; the start is `NO_TIME` if there is none."""
    start = nanoseconds([event.ts for event in events], exact)
    duration = nanoseconds([event.dur for event in events], exact)
    known = (start != NO_TIME) & (duration != NO_TIME)
    return start, start + np.where(known, duration, 0)


def nanoseconds(microseconds: list[Any], exact: bool) -> Ints:
    if exact:
        return np.array([_exact_time(bytes(raw).decode().strip('"')) for raw in microseconds], np.int64)
    return _float_ns(microseconds)


def _float_ns(microseconds: list[float]) -> Ints:
    """Convert microseconds to nanoseconds exactly: the whole part and the rest are multiplied separately."""
    values = np.array(microseconds, np.float64)
    known = np.abs(values) < LARGEST_US
    values[~known] = 0.0
    whole = np.floor(values)
    part = values - whole
    large = values > FLOAT_HAS_NANOSECONDS_US
    if large.any() and (len(values) < FEW or part[large].any()):
        raise InexactTimesError
    result: Ints = whole.astype(np.int64) * 1000 + np.rint(part * 1000).astype(np.int64)
    result[~known] = NO_TIME
    return result


def _exact_time(text: str) -> int:
    try:
        time = Decimal(text)
    except InvalidOperation:
        return int(NO_TIME)
    return int((time * 1000).to_integral_value()) if time.is_finite() and abs(time) < LARGEST_US else int(NO_TIME)
