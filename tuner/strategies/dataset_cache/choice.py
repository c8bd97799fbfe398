"""Setting of `dataset_cache`: decoded samples kept in memory or on a local disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class DatasetCacheSetting(Setting):
    strategy: ClassVar[str] = "dataset_cache"

    where: Literal[None, "memory", "disk"] = None
