"""Setting of `device_prefetch`: next batch copied on a side stream, optionally in the workload's byte form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class DevicePrefetchSetting(Setting):
    strategy: ClassVar[str] = "device_prefetch"

    ahead: bool = False
    as_bytes: bool = False
