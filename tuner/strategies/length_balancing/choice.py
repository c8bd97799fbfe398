"""Setting of `length_balancing`: batches of samples of similar length, balanced across ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class LengthBalancingSetting(Setting):
    strategy: ClassVar[str] = "length_balancing"

    pool_batches: Annotated[int, range(1025)] = 0
