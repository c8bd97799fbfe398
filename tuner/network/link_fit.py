"""Fit of a link to measured collectives: latency, bandwidth and the constant part of a call.

Every timing is one equation of the alpha-beta model (`collective_costs`), linear in the three unknowns. They are found
by least squares of the relative errors, so that microseconds of small messages count as much as milliseconds of large
ones; none of them can be negative. Single points far from the rest (another process had the core) are given less
weight: three rounds of Huber's weights. Where noise hides that the time grows with the bytes, a link is still taken to
be at most ten times as fast as the fastest message over it.

With two ranks only the difference between one step (all-gather) and two (all-reduce) tells the latency of a step from
the constant part of a call; measure both.

Source: Huber, "Robust Estimation of a Location Parameter" (1964); Lawson and Hanson, "Solving Least Squares Problems"
(1974), chapter 23 (non-negative least squares)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steptune.tuner.errors import RunnerError
from steptune.tuner.network.collective_costs import bus_factor, num_steps
from steptune.tuner.records import CollectiveTiming, Link

NUM_ROUNDS = 3
FAR = 1.5
"""Distance of a point, in median absolute residuals, beyond which its weight shrinks."""
NEAR = 0.02
"""Minimum relative residual at which a point can lose weight."""
MOST_OF_SEEN = 10.0
"""Maximum bandwidth of a fitted link, as a multiple of the highest bandwidth that a message reached."""


def fit_link(timings: Sequence[CollectiveTiming], *, kind: str, num_sharing: int = 1) -> Link:
    """Return the link whose costs are closest to the measurements.

    Args:
        num_sharing: Groups that ran at the same time over the same link.

    Raises:
        RunnerError: The points have fewer than two sizes, which do not determine a bandwidth.
    """
    if len({timing.message_bytes for timing in timings}) < 2:
        raise RunnerError(
            f"fitting a link requires timings of at least 2 message sizes; the {len(timings)} timings cover fewer"
        )
    from scipy.optimize import nnls

    durations_ns = np.array([t.duration_ns for t in timings], dtype=float)
    wire_bytes = np.array([num_sharing * t.message_bytes * bus_factor(t.collective, t.num_ranks) for t in timings])
    steps = np.array([num_steps(t.collective, t.num_ranks) for t in timings])
    least_ns_per_byte = float(np.min(durations_ns / wire_bytes)) / MOST_OF_SEEN
    # Relative to what was measured; beyond the least time of the bytes.
    equations = np.column_stack([np.ones(len(timings)), steps, wire_bytes]) / durations_ns[:, None]
    wanted = 1 - least_ns_per_byte * equations[:, 2]
    scale = equations.max(axis=0)
    weights = np.ones(len(timings))
    for _ in range(NUM_ROUNDS):
        found, _ = nnls(equations / scale * weights[:, None], wanted * weights)
        residuals = np.abs(equations / scale @ found - wanted)
        limit = max(NEAR, FAR * float(np.median(residuals)))
        weights = np.sqrt(np.minimum(1, limit / np.maximum(residuals, limit)))
    call_ns, latency_ns, further_ns_per_byte = (float(value) for value in found / scale)
    return Link(
        kind=kind,
        latency_ns=latency_ns,
        bytes_per_s=1e9 / (least_ns_per_byte + further_ns_per_byte),
        call_ns=call_ns,
        num_sharing=num_sharing,
        fit_residual=float(np.sqrt(np.mean(residuals**2))),
        timings=tuple(timings),
    )
