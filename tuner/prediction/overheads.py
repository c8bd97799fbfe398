"""Compute that ways to communicate add to a rank: copies of gradients and of parameters.

DDP copies gradients into buckets and back unless they are views of them (`bucket_views`); those of 16 bits are widened
to be added up over more than two ranks. FSDP copies what it gathers out of one buffer, and gradients into another. Each
copy reads and writes: it takes its bytes over the measured bandwidth of a large copy.
"""

from __future__ import annotations

from collections.abc import Mapping

from steptune.tuner.prediction.volumes import Volumes
from steptune.tuner.records import Calibration, Choice
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.exchange import SENT_BYTES, widening_bytes
from steptune.tuner.strategies.gradient_compression.choice import GradientCompressionSetting
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting
from steptune.tuner.strategies.sharding.choice import ShardingSetting


def scattered_bytes(choices: Mapping[str, Choice], volumes: Volumes) -> float:
    """Bytes of one element of a gradient that FSDP reduces, in 16 bits where it may."""
    method = Settings(choices)[GradientCompressionSetting].method
    return SENT_BYTES[str(method)] if method else volumes.formats.reduced


def copies_ns(choices: Mapping[str, Choice], volumes: Volumes, calibration: Calibration) -> float:
    """Time of copies in the backward pass of a step on several ranks; nothing where the bandwidth was not measured."""
    rate = calibration.copy_bytes_per_s
    if not rate:
        return 0.0
    settings = Settings(choices)
    sharding = settings[ShardingSetting]
    if sharding.is_fsdp:
        gathers = 2 if sharding.frees else 1
        count = settings[MicroBatchSetting].num_micro_batches
        reductions = count if sharding.reduce_each else 1
        gathered = count * gathers * volumes.num_elements * volumes.formats.gathered
        scattered = reductions * volumes.num_trained * scattered_bytes(choices, volumes)
        return 2 * (gathered + scattered) / rate * 1e9
    copied = 0.0 if settings[DdpBucketsSetting].bucket_views else 2 * 2 * volumes.all_gradients_bytes
    return (copied + volumes.num_trained * widening_bytes(volumes.formats, choices)) / rate * 1e9
