"""Comparison of masks module by module: the share of its input that a module sets to zero, and the scale of the rest.

Dropout that is a third too strong hardly scatters gradients more, but thousands of elements say what its rate is. A
module masks where its output is its input times zero or times one constant. Rates of the same step are taken to
vary from draw to draw as much as the reference's own rates, and at least as much as independent elements would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from steptune.tuner.records import Record

RATE_LIMIT = 5.0
"""Maximum distance between mean rates that passes, in standard errors."""
SCALE_LIMIT = 0.02
"""Maximum relative difference between scales that passes."""
FEWEST_DRAWS = 4


class ModuleMasks(Record):
    """Masks of one module.

    Attributes:
        rates: Share of the elements that are set to zero, by draw.
        scale: Factor of the kept elements; NaN where they are not all scaled alike, 0 where no draw kept any.
        count: Number of elements sampled in a draw.
    """

    rates: tuple[float, ...]
    scale: float
    count: int

    @property
    def mean(self) -> float:
        return sum(self.rates) / len(self.rates)

    @property
    def variance(self) -> float:
        """Variance of the rate over single draws."""
        mean = self.mean
        seen = sum((rate - mean) ** 2 for rate in self.rates) / max(1, len(self.rates) - 1)
        return max(seen, mean * (1 - mean) / max(1, self.count), 1 / max(1, self.count) ** 2)

    @property
    def is_mask(self) -> bool:
        return len(self.rates) >= FEWEST_DRAWS and 0 < self.mean < 1 and not math.isnan(self.scale)


@dataclass(frozen=True, kw_only=True)
class MaskDeviation:
    """Deviation of the module whose masks differ most: `ratio` is the deviation as a share of the limit, `detail` its
    description.
    """

    ratio: float = 0.0
    detail: str = ""


def worst_module(reference: Mapping[str, ModuleMasks], found: Mapping[str, ModuleMasks]) -> MaskDeviation | None:
    """Return the largest deviation over the modules that both trainings have; None if no module of the reference sets
    inputs to zero.
    """
    deviations = [*_deviations(reference, found)]
    return max(deviations, key=lambda deviation: deviation.ratio) if deviations else None


def _deviations(reference: Mapping[str, ModuleMasks], found: Mapping[str, ModuleMasks]) -> Iterator[MaskDeviation]:
    for name, wanted in reference.items():
        own = found.get(name)
        if own is None or not own.rates or not wanted.is_mask:
            continue
        error = math.sqrt(wanted.variance * (1 / len(wanted.rates) + 1 / len(own.rates)))
        yield MaskDeviation(
            ratio=abs(own.mean - wanted.mean) / error / RATE_LIMIT,
            detail=f"{name} sets {own.mean:.3g} of its input to zero, but the reference sets {wanted.mean:.3g}",
        )
        apart = abs(own.scale / wanted.scale - 1) if own.scale and wanted.scale else 0.0
        yield MaskDeviation(
            ratio=math.inf if math.isnan(apart) else apart / SCALE_LIMIT,
            detail=(
                f"{name} scales the elements that it keeps by {own.scale:.3g}, but the reference by {wanted.scale:.3g}"
            ),
        )
