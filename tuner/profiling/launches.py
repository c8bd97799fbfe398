"""Links from device operations to the host calls that launched them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptune.tuner.profiling.trace import Ints, Kind, Trace

NOT_LAUNCHED = -1


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Launch call of every row of `trace.work`; -1 if the trace has no call.

    Attributes:
        row: Row of the launch call in `trace.host`.
        start, thread: Start and thread of the call.
    """

    row: Ints
    start: Ints
    thread: Ints


def find_launches(trace: Trace) -> Launches:
    """Match device operations to runtime calls by correlation id.

    One call can launch many operations (a CUDA graph). Of several calls with the same id the
    earliest counts: a runtime call contains the driver's.
    """
    host, work = trace.host, trace.work
    calls = np.flatnonzero((host.kind == Kind.RUNTIME) & (host.correlation >= 0))
    if len(calls) == 0:
        none = np.full(len(work), NOT_LAUNCHED, dtype=np.int64)
        return Launches(row=none, start=none, thread=none)
    calls = calls[np.argsort(host.correlation[calls], kind="stable")]
    keys = host.correlation[calls]
    position = np.minimum(np.searchsorted(keys, work.correlation, side="left"), len(calls) - 1)
    known = (work.correlation >= 0) & (keys[position] == work.correlation)
    found = calls[position]
    return Launches(
        row=np.where(known, found, NOT_LAUNCHED),
        start=np.where(known, host.start[found], NOT_LAUNCHED),
        thread=np.where(known, host.thread[found], NOT_LAUNCHED).astype(np.int64),
    )
