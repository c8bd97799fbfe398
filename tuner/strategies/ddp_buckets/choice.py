"""Setting of `ddp_buckets`: size of DDP's gradient buckets, static graph, gradients as views of their bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from steptune.tuner.strategies.api import Setting


@dataclass(frozen=True, kw_only=True)
class DdpBucketsSetting(Setting):
    strategy: ClassVar[str] = "ddp_buckets"

    bucket_cap_mb: Annotated[int, range(1, 65537)] = 25
    first_bucket_mb: Annotated[int, range(1, 65537)] = 1
    static_graph: bool = False
    bucket_views: bool = False
    find_unused: bool = False
