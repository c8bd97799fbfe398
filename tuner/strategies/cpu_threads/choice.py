"""Setting of `cpu_threads`: intra-operator threads and their binding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class CpuThreadsSetting(Setting):
    strategy: ClassVar[str] = "cpu_threads"

    num_threads: Annotated[int | None, None, range(1, 1025)] = None
    bind: Literal[None, "close", "spread", "true"] = None
