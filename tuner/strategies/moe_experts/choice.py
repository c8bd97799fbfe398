"""Setting of `moe_experts`: experts of a mixture run looped, batched or grouped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class MoeExpertsSetting(Setting):
    strategy: ClassVar[str] = "moe_experts"

    execution: Literal[None, "looped", "batched", "grouped"] = None
