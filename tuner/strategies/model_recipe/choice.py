"""Setting of `model_recipe`: matmuls padded to multiples of 8 or 64; a pooled classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class ModelRecipeSetting(Setting):
    strategy: ClassVar[str] = "model_recipe"

    pad_multiple: Literal[1, 8, 64] = 1
    pooled_classifier: bool = False
