"""Setting of `moe_experts`: execution of a model's experts in a loop, batched or grouped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class MoeExpertsSetting(Setting):
    strategy: ClassVar[str] = "moe_experts"

    execution: Literal[None, "looped", "batched", "grouped"] = None
