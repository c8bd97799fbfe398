"""Setting of `nccl_settings`: NCCL's algorithm, protocol, channels, sockets and threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class NcclSetting(Setting):
    strategy: ClassVar[str] = "nccl_settings"

    algorithm: Literal[None, "own", "ring", "tree"] = None
    protocol: Literal[None, "own", "simple", "ll"] = None
    min_channels: Annotated[int | str | None, None, "own", range(1, 65)] = None
    max_channels: Annotated[int | str | None, None, "own", range(1, 65)] = None
    socket_threads: Annotated[int | str | None, None, "own", range(1, 17)] = None
    sockets_per_thread: Annotated[int | str | None, None, "own", range(1, 17)] = None
