"""The times of events: from microseconds in a file to integer nanoseconds, without an error.

`ts` and `dur` are microseconds: integers before torch 2.3, three decimals since. Times before that were counted
from 1970, in which a float has no nanoseconds left: those are read from the text.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from steptune.tuner.errors import SteptuneError
from steptune.tuner.profiling.trace import Ints

FLOAT_HAS_NANOSECONDS_US = 2**43
"""Beyond this many microseconds the steps of a float are wider than two nanoseconds."""
NO_TIME = np.iinfo(np.int64).min
FEW = 1000
"""Decimals of fewer times than these may all have been rounded away."""
LARGEST_US = 2**62 / 1000
"""A start and a duration below this (146 years) have a sum that an int64 holds in nanoseconds."""


class InexactTimesError(SteptuneError):
    """Times have decimals that a float of their size cannot hold: they have to be read from the text."""


def times(events: list[Any], exact: bool) -> tuple[Ints, Ints]:
    """Starts and ends; the start is `NO_TIME` where there is none."""
    start = nanoseconds([event.ts for event in events], exact)
    duration = nanoseconds([event.dur for event in events], exact)
    known = (start != NO_TIME) & (duration != NO_TIME)
    return start, start + np.where(known, duration, 0)


def nanoseconds(microseconds: list[Any], exact: bool) -> Ints:
    if exact:
        return np.array([_exact_time(bytes(raw).decode().strip('"')) for raw in microseconds], np.int64)
    return _float_ns(microseconds)


def _float_ns(microseconds: list[float]) -> Ints:
    """Exact: the whole part has no error, and the rest is multiplied by itself."""
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
