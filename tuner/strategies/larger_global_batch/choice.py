"""Setting of `larger_global_batch`: several batches in one step, up to the user's limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class LargerGlobalBatchSetting(Setting):
    strategy: ClassVar[str] = "larger_global_batch"

    factor: Annotated[int, range(1, 1025)] = 1
    rule: Literal["linear", "sqrt", "none"] = "linear"
