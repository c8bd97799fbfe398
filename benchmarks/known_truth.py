"""Truth of a pair of `known_answers.py`: the share of a step that is saved without a cause, and how sure it is.

Blocks of four short windows, A B B A and then B A A B, so that what drifts hits both sides alike. A window follows a
few steps of its own side without a break: it begins with the lead that the host usually has. Garbage is not collected
meanwhile, nor in the captured steps: a collection would hit some windows and not others. The truth is the trimmed mean
of the blocks' shares; blocks are added until the half-width of its 95 % interval is below one point of the step, or
until the time of a pair is spent.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from scipy.stats import mstats

Act = Callable[[], None]
WITH, WITHOUT = 0, 1
TRIMMED = 0.2
"""Part of the blocks that is left out at each end."""
CERTAIN = 0.01
"""Half-width of the interval at which a truth is known well enough."""
JUST_BEFORE = 4
"""Blocks whose windows give the time of the unprofiled steps: the host's pace some time before is not that of the
capture.
"""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How both sides are timed.

    Attributes:
        num_warm: Steps before each window.
        least_steps: Of a window.
        length_s: Aimed at for a window.
        least_blocks: Fewer give no interval.
        most_s: Time of a pair; no block is begun after it.
    """

    num_warm: int = 3
    least_steps: int = 4
    length_s: float = 0.06
    least_blocks: int = 6
    most_s: float = 20.0


SMALL = Windows(num_warm=1, least_steps=2, length_s=0.01, most_s=2.0)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Seconds per step with a cause and without it, by block."""

    with_s: tuple[float, ...]
    without_s: tuple[float, ...]

    @property
    def shares(self) -> list[float]:
        return [1 - after / before for before, after in zip(self.with_s, self.without_s, strict=True)]

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 95 % interval of the trimmed mean of the shares."""
        low, high = mstats.trimmed_mean_ci(self.shares, limits=(TRIMMED, TRIMMED))
        return float(low), float(high)

    @property
    def half_width(self) -> float:
        low, high = self.interval
        return (high - low) / 2

    @property
    def unprofiled_ns(self) -> int:
        return round(statistics.fmean(self.with_s[-JUST_BEFORE:]) * 1e9)

    def row(self) -> dict:
        low, high = self.interval
        return {
            "with_ms": round(statistics.median(self.with_s) * 1e3, 4),
            "without_ms": round(statistics.median(self.without_s) * 1e3, 4),
            "unprofiled_ns": self.unprofiled_ns,
            "true": round((low + high) / 2, 4),
            "half_width": round(self.half_width, 4),
            "true_of_blocks": [round(share, 4) for share in self.shares],
        }


def in_turns(sides: Sequence[Act], seconds: Callable[[Act, int, int], float], windows: Windows) -> Truth:
    """Times both sides in balanced blocks.

    Args:
        sides: The step with the cause and without it.
        seconds: Time of one of a number of steps of a side, after a number of others.
    """
    counts = [_num_steps(seconds(side, 3, windows.num_warm), windows) for side in sides]
    times: tuple[list[float], list[float]] = ([], [])
    began = time.monotonic()
    while True:
        for side, mean_s in enumerate(
            _block(sides, seconds, counts, windows.num_warm, turned=len(times[WITH]) % 2 == 1)
        ):
            times[side].append(mean_s)
        truth = Truth(with_s=tuple(times[WITH]), without_s=tuple(times[WITHOUT]))
        if len(truth.with_s) < windows.least_blocks:
            continue
        if truth.half_width < CERTAIN or time.monotonic() - began > windows.most_s:
            return truth


def _block(
    sides: Sequence[Act],
    seconds: Callable[[Act, int, int], float],
    counts: Sequence[int],
    num_warm: int,
    *,
    turned: bool,
) -> list[float]:
    """Seconds per step of each side in four windows, of which the second side has the outer ones if it is turned."""
    windows: tuple[list[float], list[float]] = ([], [])
    outer, inner = (WITHOUT, WITH) if turned else (WITH, WITHOUT)
    for side in (outer, inner, inner, outer):
        windows[side].append(seconds(sides[side], counts[side], num_warm))
    return [statistics.fmean(times) for times in windows]


def _num_steps(step_s: float, windows: Windows) -> int:
    return max(windows.least_steps, round(windows.length_s / step_s))


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection of garbage but those that are asked for."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
