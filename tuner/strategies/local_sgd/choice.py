"""Setting of `local_sgd`: ranks step alone and average their models every few steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class LocalSgdSetting(Setting):
    strategy: ClassVar[str] = "local_sgd"

    every: Annotated[int, range(1, 1025)] = 1
    warm_up_steps: Annotated[int, range(10000001)] = 4
    inside: bool = False
