"""Setting of `hierarchical_allreduce`: gradients reduced inside every host, then between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class HierarchicalAllreduceSetting(Setting):
    strategy: ClassVar[str] = "hierarchical_allreduce"

    levels: Literal[1, 2] = 1
