"""Combination rules of `nccl_settings`: dropped parameters and choices to try together."""

from __future__ import annotations

from steptune.tuner.strategies.api import Dropped, Together
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.nccl_settings.choice import NcclSetting
from steptune.tuner.strategies.sharding.choice import ShardingSetting

DROPPED = (
    Dropped(
        setting=NcclSetting,
        parameters=("algorithm",),
        when=lambda s: s[ShardingSetting].mode in ("full", "grad_op"),
        reason="the algorithm applies to all-reduce, but FSDP uses reduce-scatter",
    ),
)

TOGETHER = (
    Together(
        between=(NcclSetting, DdpBucketsSetting),
        reason="more sockets slow down small messages, so sockets and bucket size are searched together",
    ),
)
