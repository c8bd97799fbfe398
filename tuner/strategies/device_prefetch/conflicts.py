"""Combination rules of `device_prefetch`: refused combinations, dropped parameters and choices to try together."""

from __future__ import annotations

from steptune.tuner.strategies.api import Conflict, Dropped, Together
from steptune.tuner.strategies.data_loading.choice import DataLoadingSetting
from steptune.tuner.strategies.dataset_cache.choice import DatasetCacheSetting
from steptune.tuner.strategies.device_prefetch.choice import DevicePrefetchSetting

CONFLICTS = (
    Conflict(
        between=(DevicePrefetchSetting, DataLoadingSetting),
        when=lambda s, e, w: s[DevicePrefetchSetting].ahead and not s[DataLoadingSetting].pin_memory,
        reason="only copies from pinned memory are asynchronous: set pin_memory=True in data_loading",
    ),
    Conflict(
        between=(DevicePrefetchSetting, DatasetCacheSetting),
        when=lambda s, e, w: s[DevicePrefetchSetting].as_bytes and s[DatasetCacheSetting].where == "disk",
        reason="as_bytes requires samples in byte form, but the disk cache stores converted samples",
    ),
)

DROPPED = (
    Dropped(
        setting=DevicePrefetchSetting,
        parameters=("as_bytes",),
        when=lambda s: not s[DevicePrefetchSetting].ahead,
        reason="as_bytes applies only to batches that are copied ahead",
    ),
)

TOGETHER = (
    Together(between=(DataLoadingSetting, DevicePrefetchSetting), reason="copying ahead requires pinned memory"),
)
