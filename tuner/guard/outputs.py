"""Outputs of single modules, held to FP32 from the inputs that each of them had.

What only 16-bit arithmetic does wrong (a kernel whose outputs are 3 % too large in bfloat16 alone) may move gradients
by less than rounding does: rounding piles up through a model. In one module, from its own inputs, it does not: outputs
differ by less than one unit roundoff.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LIMIT = 2.0
"""Unit roundoffs of their norm by which outputs may differ. Correct changes of small trainings reach 1.2."""


@dataclass(frozen=True, kw_only=True)
class ModuleOutput:
    """One module's output beside that of FP32.

    Attributes:
        size: How much larger it is along it, in unit roundoffs of its format.
        difference: Norm of the difference over the norm, in the same.
    """

    name: str
    size: float
    difference: float

    @property
    def ratio(self) -> float:
        """Share of the limit; infinite where it is not finite and FP32 is."""
        return self.difference / LIMIT if math.isfinite(self.difference) else math.inf


def worst_output(outputs: Iterable[ModuleOutput]) -> ModuleOutput | None:
    """The module that differs most; None where there is none."""
    return max(outputs, key=lambda output: output.ratio, default=None)
