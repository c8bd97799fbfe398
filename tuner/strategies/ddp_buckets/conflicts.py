"""Combinations that `ddp_buckets` refuses."""

from __future__ import annotations

from steptune.tuner.strategies.api import Conflict
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting

CONFLICTS = (
    Conflict(
        between=(DdpBucketsSetting, MicroBatchSetting),
        when=lambda s, e, w: s[DdpBucketsSetting].static_graph and s[MicroBatchSetting].num_micro_batches != 1,
        reason="DDP records its static graph in the first backward pass, but gradient accumulation reduces no "
        "gradients in that pass",
    ),
)
