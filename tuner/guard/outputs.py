"""Comparison of each module's output with its output in FP32 from the same inputs.

A fault in 16-bit arithmetic alone (a kernel whose outputs are 3 % too large in bfloat16 alone) may move gradients
by less than rounding does: rounding piles up through a model. In one module, from its own inputs, it does not: outputs
differ by less than one unit roundoff.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LIMIT = 2.0
"""Maximum deviation of a module's output from its FP32 output, relative to the norm and in unit roundoffs. Correct
changes of small training jobs reach 1.2.
"""


@dataclass(frozen=True, kw_only=True)
class ModuleOutput:
    """Deviation of one module's output from its output in FP32.

    Attributes:
        size: Excess of the output along the FP32 output, in unit roundoffs of its dtype.
        difference: Norm of the difference over the norm in FP32, in the same unit.
    """

    name: str
    size: float
    difference: float

    @property
    def ratio(self) -> float:
        """Deviation as a share of the limit; infinite if the output is not finite although the FP32 output is."""
        return self.difference / LIMIT if math.isfinite(self.difference) else math.inf


def worst_output(outputs: Iterable[ModuleOutput]) -> ModuleOutput | None:
    """Return the output that deviates most; None if there is none."""
    return max(outputs, key=lambda output: output.ratio, default=None)
