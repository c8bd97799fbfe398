"""From measured collectives to a link: latency, bandwidth and the constant part of a call.

Every timing is one equation of the alpha-beta model (`collective_costs`), linear in the three unknowns. They are found
by least squares of the relative errors, so that microseconds of small messages count as much as milliseconds of large
ones; none of them can be negative. Single points far from the rest (another process had the core) are given less
weight: three rounds of Huber's weights.

With two ranks only the difference between one step (all-gather) and two (all-reduce) tells the latency of a step from
the constant part of a call; measure both.

Source: Huber, "Robust Estimation of a Location Parameter" (1964); Lawson and Hanson, "Solving Least Squares Problems"
(1974), chapter 23 (non-negative least squares)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from tuner.errors import RunnerError
from tuner.network.collective_costs import bus_factor, num_steps
from tuner.records import CollectiveTiming, Link

NUM_ROUNDS = 3
FAR = 1.5
"""In median absolute residuals: beyond it a point's weight shrinks."""
NEAR = 0.02
"""Residuals below this share never count as far."""


def fit_link(timings: Sequence[CollectiveTiming], *, kind: str, num_sharing: int = 1) -> Link:
    """The link whose costs are nearest to what was measured.

    Args:
        num_sharing: Groups that ran at the same time over the same link.

    Raises:
        RunnerError: The points tell no bandwidth: fewer than two sizes, or the time does not grow with the bytes.
    """
    if len({timing.message_bytes for timing in timings}) < 2:
        raise RunnerError(f"a link is fitted to messages of several sizes; there are timings of {len(timings)}")
    wire_bytes = [num_sharing * t.message_bytes * bus_factor(t.collective, t.num_ranks) for t in timings]
    steps = [num_steps(t.collective, t.num_ranks) for t in timings]
    durations_ns = np.array([t.duration_ns for t in timings], dtype=float)
    relative = np.column_stack([np.ones(len(timings)), steps, wire_bytes]) / durations_ns[:, None]
    scale = relative.max(axis=0)
    weights = np.ones(len(timings))
    for _ in range(NUM_ROUNDS):
        found, _ = nnls(relative / scale * weights[:, None], weights)
        residuals = np.abs(relative / scale @ found - 1)
        limit = max(NEAR, FAR * float(np.median(residuals)))
        weights = np.sqrt(np.minimum(1, limit / np.maximum(residuals, limit)))
    call_ns, latency_ns, ns_per_byte = (float(value) for value in found / scale)
    if ns_per_byte <= 0:
        largest = max(timings, key=lambda timing: timing.message_bytes)
        raise RunnerError(
            f"the time of a collective over {kind} does not grow with its bytes, up to {largest.message_bytes} bytes "
            f"in {largest.duration_ns} ns: measure larger messages, on a machine that does nothing else"
        )
    return Link(
        kind=kind,
        latency_ns=latency_ns,
        bytes_per_s=1e9 / ns_per_byte,
        call_ns=call_ns,
        num_sharing=num_sharing,
        fit_residual=float(np.sqrt(np.mean(residuals**2))),
        timings=tuple(timings),
    )
