"""Confirmation, by new runs, that the search's winner is faster.

The search chose its winner because it measured well, so its own figures flatter it. The confirmation measures the
finalists and the baseline again, in fresh processes, in blocks: every block has one run of each, taking turns where
they fit together. The order is random in every other block and reversed in the next, so that a machine which slows down
steadily favours nobody. Only ratios within these blocks enter the estimate.

Blocks follow one after another until the gain is proven, cannot be proven any more, or as many as were planned are
done. `spending.py` says how sure each end must be; no end by itself makes a gain look proven or an interval too narrow.
An interval that is too wide for a verdict gets further blocks, up to `MAX_BLOCKS`, while the budget lasts. Its width
does not depend on the gain, so this favours no verdict (an internal pilot study).

How much runs differ is known from more than the blocks: from all runs of the same two configurations in the study.
That makes even two blocks informative. The run that selected the winner is a lucky one: where both sides scatter
alike, it is left out. Where the sides clearly differ each has a scatter of its own (Welch). Where the blocks' ratios
scatter clearly more than that, or at least three of them clearly less, their own scatter counts: they then reflect
something that single runs do not, such as a load that both sides of a block share.

Intervals are those of Student, widened for the number of finalists, so that they hold for all finalists at once and
choosing the best of them is allowed. Finalists that are compared with the same starts of the baseline err together:
that widens them less (Dunnett).

The prediction for another confirmation is more careful. Blocks taken within a minute do not see how a shared machine
changes over an hour, and a machine that slows down seldom slows two configurations alike. So the scatter of the
baseline over the whole study enters the prediction.

Sources: Dunnett, "A multiple comparison procedure for comparing several treatments with a control", J. Am. Stat. Assoc.
50 (1955); Welch, "The generalization of 'Student's' problem when several different population variances are involved",
Biometrika 34 (1947); Viele et al., "Use of historical control data for assessing treatment effects in clinical trials",
Pharmaceutical Statistics 13 (2014), for testing before pooling; Lan, Simon and Halperin, "Stochastically curtailed
tests in long-term clinical trials", Sequential Analysis 1 (1982), for the end for futility; Wittes and Brittain, "The
role of internal pilot studies in increasing the efficiency of clinical trials", Statistics in Medicine 9 (1990), for
more blocks where the scatter is larger than was planned for.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steptune.tuner.estimates import log_rate, log_ratio, student_quantile
from steptune.tuner.records import Candidate, Gain, Interval, Purpose, TrialResult
from steptune.tuner.search.spending import looks, simultaneous_level
from steptune.tuner.speeds import is_wide

LEVEL = 0.95
LEAST_BLOCKS, MAX_BLOCKS = 2, 12
"""Minimum and maximum number of blocks. Fewer than two give no interval; two give a wide one, enough for a large gain.
"""
LONGEST_OVERRUN = 0.15
"""Maximum overrun of the budget that the minimum number of blocks may cause, as a share of the budget."""
POWER = 0.8
MORE, LESS = 0.05, 0.001
"""Significance levels of two tests: whether the variance of blocks is larger, and whether it is smaller, than that of
single runs. A smaller variance narrows the interval, so the second test requires stronger evidence.
"""
UNLIKE = 0.2
"""Significance level of the test whether the two sides of a comparison have different variances."""
ALIKE = 0.5
"""Share of the variance of a difference that comes from each side, if both sides have the same variance."""
HOPELESS = 0.1
"""Minimum probability of proving a gain for the remaining blocks to be run."""
HOPE = 0.67
"""Number of standard errors by which the estimated gain is raised, to its upper quartile, before the probability of a
proof is computed.
"""
UNSHARED = 0.5
"""Share of a change in the machine's speed that affects only one of two configurations, from 0 (their ratio never
changes) to 1. benchmarks/repeatability.py shows whether a half is enough.
"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Block of a confirmation: one run of the baseline and of each finalist."""

    number: int
    order: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Variance of log rates, or of their differences (log ratios), with its degrees of freedom.

    Attributes:
        common: Smaller side's share of the variance of a difference: a lower bound of the correlation between
            differences with a common side. 0 where it is unknown.
    """

    variance: float
    degrees: float
    common: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """Finalist of a confirmation, with the results of its blocks.

    Attributes:
        log_ratios: Logarithms of its rate over the baseline's, by block.
        gain: Gain with the interval that holds if the confirmation ends here; None for fewer than two blocks.
        standard_error: Standard error of the mean log ratio.
        is_proven: Whether it is proven faster so clearly that the confirmation may end early.
        is_hopeless: Whether the remaining blocks are unlikely to prove it faster.
    """

    candidate: Candidate
    log_ratios: tuple[float, ...]
    gain: Gain | None
    standard_error: float = 0.0
    is_proven: bool = False
    is_hopeless: bool = False

    @property
    def is_faster(self) -> bool:
        return self.gain is not None and self.gain.interval.low > 1.0


def num_blocks(*, at_least: int, noise_sd: float, expected_gain: float, num_finalists: int) -> int:
    """Return the number of blocks with which a confirmation proves an expected gain with a probability of 80 %."""
    effect = math.log1p(max(0.0, expected_gain))
    for count in range(at_least, MAX_BLOCKS):
        error = noise_sd * math.sqrt(2 / count)
        needed = (_quantile(count, num_finalists) + student_quantile(POWER, count - 1)) * error
        if needed <= effect:
            return count
    return at_least if effect <= 0 else max(at_least, MAX_BLOCKS)


def plan_blocks(reference: Candidate, finalists: Sequence[Candidate], count: int, seed: int) -> list[Block]:
    """Plan blocks in which every candidate is run once: one block in random order, the next in reverse, and so on."""
    generator = random.Random(seed)
    blocks: list[Block] = []
    for number in range(count):
        order = [reference, *finalists]
        generator.shuffle(order)
        blocks.append(Block(number=number, order=blocks[-1].order[::-1] if number % 2 else tuple(order)))
    return blocks


def judge(
    reference: Candidate,
    finalists: Sequence[Candidate],
    blocks: Sequence[dict[str, TrialResult]],
    earlier: Mapping[str, Sequence[TrialResult]] | None = None,
    planned: int | None = None,
) -> list[Finalist]:
    """Return the gain of every finalist with its simultaneous interval.

    Args:
        blocks: Good results of each block, by candidate key.
        earlier: Good results of the search by candidate key.
        planned: Maximum number of blocks; None where the number was fixed beforehand, without interim looks at the
            data.

    Returns:
        The finalists, the best first; those with fewer than two complete blocks have no gain.
    """
    starts = all_starts(earlier or {}, blocks)
    judged = [compare(c, reference, blocks, starts, len(finalists), planned) for c in finalists]
    judged.sort(key=lambda finalist: -(finalist.gain.ratio if finalist.gain else 0.0))
    return judged


def has_wide_interval(judged: Sequence[Finalist]) -> bool:
    """Say whether the best finalist's interval is too wide for a verdict."""
    return bool(judged) and judged[0].gain is not None and is_wide(judged[0].gain.interval)


def early_end(judged: Sequence[Finalist]) -> str:
    """Return the reason why no further block is needed; empty while one is needed, for instance because an interval is
    wide.
    """
    if has_wide_interval(judged):
        return ""
    if judged and judged[0].is_proven:
        return "the gain was proven"
    if judged and all(finalist.is_hopeless for finalist in judged):
        return "more blocks were unlikely to prove a gain"
    return ""


def compare(
    candidate: Candidate,
    reference: Candidate,
    blocks: Sequence[dict[str, TrialResult]],
    starts: Mapping[str, Sequence[TrialResult]],
    num_comparisons: int,
    planned: int | None,
) -> Finalist:
    """Compare the speed of one candidate with another's, by the blocks that have both.

    Args:
        starts: All good runs of both by candidate key, those of the blocks included, for their scatter.
        num_comparisons: Number of comparisons over which the interval is simultaneous.
        planned: As in `judge`.
    """
    both = [b for b in blocks if reference.key in b and candidate.key in b]
    log_ratios = tuple(_block_log_ratio(b[candidate.key], b[reference.key]) for b in both)
    one, other = (starts.get(key, ()) for key in (candidate.key, reference.key))
    levels = [rate for rates in _by_place(other) for rate in _centred(rates)]
    count = len(log_ratios)
    if count < 2:
        return Finalist(candidate=candidate, log_ratios=log_ratios, gain=None)
    spread = spread_of(log_ratios, one, other)
    alpha = simultaneous_level(1 - LEVEL, num_comparisons, round(spread.degrees, 1), spread.common)
    first = count if planned is None else LEAST_BLOCKS  # earlier looks have spent their share at the last one, too
    planned = count if planned is None else max(planned, count)
    look = looks(first, planned, alpha, count)[count]
    mean, error = statistics.fmean(log_ratios), math.sqrt(spread.variance / count)
    return Finalist(
        candidate=candidate,
        log_ratios=log_ratios,
        gain=gain_of(log_ratios, num_comparisons, levels, spread=spread, alpha=look.last),
        standard_error=error,
        is_proven=mean > student_quantile(1 - look.early / 2, spread.degrees) * error,
        is_hopeless=count < planned and _chance(mean, spread, count, planned, look.last) < HOPELESS,
    )


def _chance(mean: float, spread: Spread, count: int, planned: int, alpha: float) -> float:
    """Return the conditional power: probability that all planned blocks prove a gain slightly above its estimate."""
    hoped = mean + HOPE * math.sqrt(spread.variance / count)
    needed = student_quantile(1 - alpha / 2, spread.degrees + planned - count) * math.sqrt(spread.variance / planned)
    expected = (count * mean + (planned - count) * hoped) / planned
    error = math.sqrt(spread.variance * (planned - count)) / planned
    return 0.5 * math.erfc((needed - expected) / error / math.sqrt(2)) if error else float(expected > needed)


# --- how much starts differ -----------------------------------------------------------------------


def spread_of(log_ratios: Sequence[float], one: Sequence[TrialResult], other: Sequence[TrialResult]) -> Spread:
    """Return the variance of the log ratio of one block, estimated from all runs of both sides or from the blocks
    alone.

    Args:
        log_ratios: Log ratios by block, at least two.
        one: Good runs of the one side.
        other: Good runs of the other side.
    """
    own = Spread(variance=statistics.variance(log_ratios), degrees=len(log_ratios) - 1)
    sides = _side(one), _side(other)
    if min(side.degrees for side in sides) < 1:
        return own
    both = _of_difference(*sides)
    if both.common == ALIKE:
        both = _of_alike(_side(_unselected(one)), _side(_unselected(other)))
    if own.variance > _f_quantile(1 - MORE, own.degrees, both.degrees) * both.variance:
        return own
    narrower = both.variance > _f_quantile(1 - LESS, both.degrees, own.degrees) * own.variance
    if narrower and own.degrees > 1:  # two blocks may agree by chance, to any number of digits
        return own
    return both


def _unselected(results: Sequence[TrialResult]) -> Sequence[TrialResult]:
    """Return all runs except the one that selected the candidate, if at least two others are left."""
    first = next((number for number, result in enumerate(results) if result.purpose is Purpose.EXPLORE), None)
    if first is None or len(results) < 3:
        return results
    return [result for number, result in enumerate(results) if number != first]


def _side(results: Sequence[TrialResult]) -> Spread:
    """Return the spread of one side's log rates around their mean in each place (machine and devices)."""
    places = _by_place(results)
    degrees = sum(len(rates) - 1 for rates in places)
    squares = math.fsum(rate**2 for rates in places for rate in _centred(rates))
    return Spread(variance=squares / degrees if degrees else 0.0, degrees=degrees)


def _of_difference(one: Spread, other: Spread) -> Spread:
    """Return the spread of the difference between two sides' log rates: from the pooled variance, or by Welch's method
    if the two variances clearly differ.
    """
    total = one.variance + other.variance
    low, high = (_f_quantile(share, one.degrees, other.degrees) for share in (UNLIKE / 2, 1 - UNLIKE / 2))
    if not total or low * other.variance < one.variance < high * other.variance:
        return _of_alike(one, other)
    uncertainty = one.variance**2 / one.degrees + other.variance**2 / other.degrees
    common = min(one.variance, other.variance) / total
    return Spread(variance=total, degrees=total**2 / uncertainty, common=common)


def _of_alike(one: Spread, other: Spread) -> Spread:
    degrees = one.degrees + other.degrees
    mean = (one.degrees * one.variance + other.degrees * other.variance) / degrees
    return Spread(variance=2 * mean, degrees=degrees, common=ALIKE)


def _f_quantile(probability: float, degrees: float, other_degrees: float) -> float:
    from scipy.special import fdtri

    return float(fdtri(degrees, other_degrees, probability))


def all_starts(
    earlier: Mapping[str, Sequence[TrialResult]], blocks: Sequence[dict[str, TrialResult]]
) -> dict[str, list[TrialResult]]:
    """Return the runs of the blocks by candidate key, and those of the search that began in the same way.

    Forks of one process differ less than new processes: with the forks of a study among the new processes of its
    blocks, simulated intervals of 95 % covered 81 to 85 %.
    """
    kinds: dict[str, set[str]] = {}
    for block in blocks:
        for key, result in block.items():
            kinds.setdefault(key, set()).add(result.interpreter)
    starts = {
        key: [result for result in results if result.interpreter in kinds.get(key, {result.interpreter})]
        for key, results in earlier.items()
    }
    for block in blocks:
        for key, result in block.items():
            starts.setdefault(key, []).append(result)
    return starts


def _by_place(results: Sequence[TrialResult]) -> list[list[float]]:
    """Group log rates by place, so that differences between machines do not count as noise."""
    by_place: dict[str, list[float]] = {}
    for result in results:
        by_place.setdefault(result.place, []).append(log_rate(result).mean)
    return list(by_place.values())


def _centred(rates: Sequence[float]) -> list[float]:
    mean = statistics.fmean(rates)
    return [rate - mean for rate in rates]


# --- intervals ------------------------------------------------------------------------------------


def gain_of(
    log_ratios: Sequence[float],
    num_finalists: int,
    levels: Sequence[float] = (),
    *,
    spread: Spread | None = None,
    alpha: float | None = None,
) -> Gain | None:
    """Return the ratio, its simultaneous interval, and the prediction interval for another confirmation of the same
    size.

    Args:
        log_ratios: Logarithms of the rate over the baseline's, by block.
        levels: Log rates of the baseline over the whole study, less the mean of their place.
        spread: Spread of a block's log ratio; None takes that of these blocks.
        alpha: Two-sided error probability of this interval; None without interim looks at the data.
    """
    if len(log_ratios) < 2:
        return None
    mean = statistics.fmean(log_ratios)
    spread = spread or Spread(variance=statistics.variance(log_ratios), degrees=len(log_ratios) - 1)
    alpha = alpha or (1 - LEVEL) / max(1, num_finalists)
    half = student_quantile(1 - alpha / 2, spread.degrees) * math.sqrt(spread.variance / len(log_ratios))
    drift = UNSHARED * _quantile(len(levels), num_finalists) * statistics.stdev(levels) if len(levels) > 1 else 0.0
    return Gain(
        ratio=math.exp(mean),
        interval=_interval(mean, half),
        prediction=_interval(mean, math.hypot(half, half, drift)),
        num_blocks=len(log_ratios),
        num_finalists=num_finalists,
    )


def _quantile(num_starts: int, num_finalists: int) -> float:
    return student_quantile(1 - (1 - LEVEL) / (2 * max(1, num_finalists)), num_starts - 1)


def _interval(centre: float, half_width: float) -> Interval:
    return Interval(low=math.exp(centre - half_width), high=math.exp(centre + half_width), level=LEVEL)


def _block_log_ratio(result: TrialResult, reference: TrialResult) -> float:
    """Return a block's log ratio: paired by round if the two runs took turns, else from the two rates."""
    paired = log_ratio(result, reference)
    if paired is not None:
        return paired.mean
    return log_rate(result).mean - log_rate(reference).mean
