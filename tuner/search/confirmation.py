"""The confirmation: is the winner of the search really faster?

The search chose its winner because it measured well, so its own figures flatter it. The confirmation
measures the finalists and the baseline again, in fresh processes, in blocks: every block has one start
of each, in random order, taking turns where they fit together. Only these figures enter the interval.

The number of blocks is fixed before the first one from the noise that the search saw. Intervals are
those of Student over the blocks' log ratios, widened for the number of finalists (Bonferroni), so that
they hold for all finalists at once and choosing the best of them is allowed.

Where a further confirmation would fall is said more carefully. Blocks taken within a minute do not see
how a shared machine changes over an hour, and a machine that slows down seldom slows two configurations
alike. So the scatter of the baseline over the whole study enters the prediction.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from steptune.tuner.estimates import log_rate, log_ratio, plain_mean, student_quantile
from steptune.tuner.records import Candidate, Gain, Interval, TrialResult

LEVEL = 0.95
LEAST_BLOCKS, MAX_BLOCKS = 2, 12
"""Without two there is no interval; that of two is wide, and enough for a large gain."""
LONGEST_OVERRUN = 0.15
"""Of the budget, by which the fewest blocks may end late."""
POWER = 0.8
UNSHARED = 0.5
"""How much of a change of the machine's speed one configuration feels and another does not: between none of
it (the ratio never changes) and all of it. benchmarks/repeatability.py shows whether a half is enough."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One start of the baseline and of each finalist."""

    number: int
    order: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """What the blocks showed of one finalist."""

    candidate: Candidate
    log_ratios: tuple[float, ...]
    """Over the baseline, by block."""
    gain: Gain | None

    @property
    def is_faster(self) -> bool:
        return self.gain is not None and self.gain.interval.low > 1.0

    def proven_faster_than(self, other: Finalist) -> bool:
        """By the differences within blocks."""
        if self is other or len(self.log_ratios) != len(other.log_ratios):
            return False
        differences = [mine - theirs for mine, theirs in zip(self.log_ratios, other.log_ratios, strict=True)]
        estimate = plain_mean(differences)
        return estimate.mean - estimate.half_width(LEVEL) > 0


def num_blocks(*, at_least: int, noise_sd: float, expected_gain: float, num_finalists: int) -> int:
    """Blocks after which an expected gain is told from none in eight of ten confirmations."""
    effect = math.log1p(max(0.0, expected_gain))
    for count in range(at_least, MAX_BLOCKS):
        error = noise_sd * math.sqrt(2 / count)
        needed = (_quantile(count, num_finalists) + student_quantile(POWER, count - 1)) * error
        if needed <= effect:
            return count
    return at_least if effect <= 0 else max(at_least, MAX_BLOCKS)


def plan_blocks(reference: Candidate, finalists: Sequence[Candidate], count: int, seed: int) -> list[Block]:
    """Blocks in which every candidate starts once, in random order."""
    generator = random.Random(seed)
    blocks = []
    for number in range(count):
        order = [reference, *finalists]
        generator.shuffle(order)
        blocks.append(Block(number=number, order=tuple(order)))
    return blocks


def judge(
    reference: Candidate,
    finalists: Sequence[Candidate],
    blocks: Sequence[dict[str, TrialResult]],
    earlier: Sequence[TrialResult] = (),
) -> list[Finalist]:
    """The gain of every finalist with its simultaneous interval.

    Args:
        blocks: Of each block, the good results by candidate key.
        earlier: What the search saw of the reference.

    Returns:
        The finalists, the best first; those of fewer than two complete blocks have no gain.
    """
    judged = []
    levels = _levels([*earlier, *(b[reference.key] for b in blocks if reference.key in b)])
    for candidate in finalists:
        both = [b for b in blocks if reference.key in b and candidate.key in b]
        ratios = tuple(_block_log_ratio(b[candidate.key], b[reference.key]) for b in both)
        judged.append(Finalist(candidate=candidate, log_ratios=ratios, gain=gain_of(ratios, len(finalists), levels)))
    judged.sort(key=lambda finalist: -(finalist.gain.ratio if finalist.gain else 0.0))
    return judged


def _levels(results: Sequence[TrialResult]) -> list[float]:
    """Log rates, less the mean of their place: how a machine changes, not how machines differ."""
    by_place: dict[str, list[float]] = {}
    for result in results:
        by_place.setdefault(result.place, []).append(log_rate(result).mean)
    return [rate - statistics.mean(rates) for rates in by_place.values() for rate in rates]


def gain_of(log_ratios: Sequence[float], num_finalists: int, levels: Sequence[float] = ()) -> Gain | None:
    """Ratio, simultaneous interval, and where a further confirmation of the same size would fall.

    Args:
        log_ratios: Over the baseline, by block.
        levels: Log rates of the baseline over the whole study, less the mean of their place.
    """
    if len(log_ratios) < 2:
        return None
    estimate = plain_mean(log_ratios)
    quantile = _quantile(len(log_ratios), num_finalists)
    half = quantile * estimate.standard_error
    drift = UNSHARED * _quantile(len(levels), num_finalists) * statistics.stdev(levels) if len(levels) > 1 else 0.0
    return Gain(
        ratio=math.exp(estimate.mean),
        interval=_interval(estimate.mean, half),
        prediction=_interval(estimate.mean, math.hypot(half, half, drift)),
        num_blocks=len(log_ratios),
        num_finalists=num_finalists,
    )


def _quantile(num_starts: int, num_finalists: int) -> float:
    return student_quantile(1 - (1 - LEVEL) / (2 * max(1, num_finalists)), num_starts - 1)


def _interval(centre: float, half_width: float) -> Interval:
    return Interval(low=math.exp(centre - half_width), high=math.exp(centre + half_width), level=LEVEL)


def _block_log_ratio(result: TrialResult, reference: TrialResult) -> float:
    """Paired by round where both took turns, else the ratio of the two rates."""
    paired = log_ratio(result, reference)
    if paired is not None:
        return paired.mean
    return log_rate(result).mean - log_rate(reference).mean
