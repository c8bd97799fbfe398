"""Noise of process starts, as log rates: what a machine does to a start, and when.

Every process is a level, which all starts at one time share, and what one start has of its own. Its standard deviation
is given in that of a plain start. Parameters come in halves: constants of the product may be fitted on `FIT` only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

SD = 0.02
"""Standard deviation of a start under the plain process."""


@dataclass
class Noise:
    """Noise of one study.

    Attributes:
        own: What a start of an arm (0: the baseline) has of its own.
        level: What starts at a time have in common; time counts starts.
        of_block: Standard deviation of what all starts of a block have in common.
        of_arm: The same of all starts of one candidate in the confirmation.
    """

    own: Callable[[random.Random, int], float]
    level: Callable[[random.Random], Callable[[int], float]] = lambda generator: lambda time: 0.0
    of_block: float = 0.0
    of_arm: float = 0.0
    seed: int = 0
    _time: int = 0
    _block: tuple[str, int] = ("", -1)
    _shared: float = 0.0
    _arms: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._level = self.level(self._random)

    def starts(self, arms: list[int], block: tuple[str, int]) -> list[float]:
        """Log rates of starts that take turns, less their true ones."""
        if block != self._block:
            self._block, self._shared = block, self._random.gauss(0, self.of_block) if self.of_block else 0.0
        common = self._level(self._time) + self._shared
        self._time += len(arms)
        return [common + self._of_arm(arm, block[0]) + self.own(self._random, arm) for arm in arms]

    def _of_arm(self, arm: int, phase: str) -> float:
        if not self.of_arm or not arm or phase != "confirm":
            return 0.0
        return self._arms.setdefault(arm, self._random.gauss(0, self.of_arm))


def plain(generator: random.Random, arm: int) -> float:
    return generator.gauss(0, SD)


def drift(per_start: float) -> Callable[[random.Random], Callable[[int], float]]:
    """A line, up or down."""

    def begin(generator: random.Random) -> Callable[[int], float]:
        slope = per_start * SD * generator.choice((-1, 1))
        return lambda time: slope * time

    return begin


def autoregressive(correlation: float, sd: float) -> Callable[[random.Random], Callable[[int], float]]:
    """AR(1); a random walk where the correlation is 1."""

    def begin(generator: random.Random) -> Callable[[int], float]:
        step = sd * SD * (math.sqrt(1 - correlation**2) if correlation < 1 else 1.0)
        levels = [generator.gauss(0, sd * SD)]

        def level(time: int) -> float:
            while len(levels) <= time:
                levels.append(correlation * levels[-1] + generator.gauss(0, step))
            return levels[time]

        return level

    return begin


def periodic(period: float, amplitude: float) -> Callable[[random.Random], Callable[[int], float]]:
    """A load that comes and goes."""

    def begin(generator: random.Random) -> Callable[[int], float]:
        phase = generator.uniform(0, 2 * math.pi)
        return lambda time: amplitude * SD * math.sin(2 * math.pi * time / period + phase)

    return begin


def heavy(degrees: float) -> Callable[[random.Random, int], float]:
    """Student's t."""

    def own(generator: random.Random, arm: int) -> float:
        return SD * generator.gauss(0, 1) / math.sqrt(generator.gammavariate(degrees / 2, 2 / degrees))

    return own


def bimodal(share: float, slower: float) -> Callable[[random.Random, int], float]:
    """Some starts are slower by so many standard deviations."""

    def own(generator: random.Random, arm: int) -> float:
        return plain(generator, arm) - (slower * SD if generator.random() < share else 0.0)

    return own


def bursts(share: float, mean: float) -> Callable[[random.Random, int], float]:
    """Some starts are slower by exponential times: one-sided."""

    def own(generator: random.Random, arm: int) -> float:
        return plain(generator, arm) - (generator.expovariate(1 / (mean * SD)) if generator.random() < share else 0.0)

    return own


def unequal(factor: float) -> Callable[[random.Random, int], float]:
    """The candidates' starts differ so many times as much as the baseline's."""
    return lambda generator, arm: plain(generator, arm) * (factor if arm else 1.0)


Process = Callable[[int], Noise]
SCATTERED, SCATTER = "scattered", 25.0
"""Process whose starts differ so many times as much: a confirmation of few blocks has a wide interval, and goes on."""


def _processes(
    *,
    line: float,
    correlation: float,
    degrees: float,
    modes: tuple[float, float],
    block: float,
    walk: float,
    period: float,
    burst: tuple[float, float],
    factor: float,
) -> dict[str, Process]:
    return {
        "iid": lambda seed: Noise(plain, seed=seed),
        SCATTERED: lambda seed: Noise(lambda g, arm: SCATTER * plain(g, arm), seed=seed),
        "drift": lambda seed: Noise(plain, drift(line), seed=seed),
        "autocorrelated": lambda seed: Noise(
            lambda g, arm: plain(g, arm) / 2, autoregressive(correlation, 1.0), seed=seed
        ),
        "heavy-tailed": lambda seed: Noise(heavy(degrees), seed=seed),
        "bimodal": lambda seed: Noise(bimodal(*modes), seed=seed),
        "shared by both arms": lambda seed: Noise(plain, of_block=block * SD, seed=seed),
        "random walk": lambda seed: Noise(plain, autoregressive(1.0, walk), seed=seed),
        "periodic load": lambda seed: Noise(plain, periodic(period, 2.0), seed=seed),
        "one-sided bursts": lambda seed: Noise(bursts(*burst), seed=seed),
        "unequal arms": lambda seed: Noise(unequal(factor), seed=seed),
        "shared by one arm's starts": lambda seed: Noise(plain, of_arm=2 * SD, seed=seed),
    }


FIT = _processes(
    line=0.2,
    correlation=0.8,
    degrees=4.0,
    modes=(0.3, 4.0),
    block=2.0,
    walk=0.3,
    period=7.3,
    burst=(0.3, 3.0),
    factor=2.0,
)
REPORT = _processes(
    line=0.5,
    correlation=0.6,
    degrees=3.0,
    modes=(0.2, 8.0),
    block=4.0,
    walk=0.7,
    period=5.1,
    burst=(0.15, 6.0),
    factor=3.0,
)
UNBOUNDED = "shared by one arm's starts"
"""No number of blocks shows it: it is reported and has no floor."""
