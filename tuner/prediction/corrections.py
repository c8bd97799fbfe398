"""Correction factors of collectives: the ratio of measured to modelled time, by collective and size.

One latency and one bandwidth do not fit all: gloo reduces the whole message on every rank even for a reduce-scatter,
NCCL changes its protocol with the size. So the model's time is multiplied by measured over modelled time of the same
collective at the nearest sizes, interpolated by the logarithm of the size. A link that was described, not measured, has
no such times.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from steptune.tuner.network.collective_costs import ring_ns
from steptune.tuner.records import Link


def correction(link: Link, collective: str, message_bytes: float) -> float:
    """Return the ratio of measured to modelled time of a collective; 1 where it was not measured."""
    ratios: dict[int, list[float]] = {}
    for timing in link.timings:
        if timing.collective == collective:
            modelled_ns = ring_ns(collective, timing.message_bytes, timing.num_ranks, link, link.num_sharing)
            ratios.setdefault(timing.message_bytes, []).append(math.log(timing.duration_ns / modelled_ns))
    if not ratios or message_bytes <= 0:
        return 1.0
    sizes = sorted(ratios)
    means = [sum(ratios[size]) / len(ratios[size]) for size in sizes]
    place = bisect_left(sizes, message_bytes)
    if place == 0 or place == len(sizes):
        return math.exp(means[min(place, len(sizes) - 1)])
    low, high = math.log(sizes[place - 1]), math.log(sizes[place])
    part = (math.log(message_bytes) - low) / (high - low)
    return math.exp((1 - part) * means[place - 1] + part * means[place])
