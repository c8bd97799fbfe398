"""Compute that communication adds to a rank: copies of gradients and of parameters.

DDP copies gradients into buckets and back unless they are views of the buckets (`bucket_views`); 16-bit gradients are
widened for sums over more than two ranks. FSDP copies what it gathers out of one buffer, and gradients into another.
Each copy reads and writes: it takes its bytes over the measured bandwidth of a large copy.
"""

from __future__ import annotations

from collections.abc import Mapping

from steptune.tuner.costs.formats import SENT_BYTES, widening_bytes
from steptune.tuner.network.exchange import Exchange
from steptune.tuner.prediction.volumes import Volumes
from steptune.tuner.records import Calibration, Choice
from steptune.tuner.strategies.api import Settings
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.situations import exchange_of


def scattered_bytes(exchange: Exchange, volumes: Volumes) -> float:
    """Return the bytes of one gradient element in FSDP's reductions: after compression, if there is any."""
    return SENT_BYTES[exchange.compression] if exchange.compression else volumes.formats.reduced


def copies_ns(choices: Mapping[str, Choice], volumes: Volumes, calibration: Calibration) -> float:
    """Return the time of the copies in the backward pass of a step on several ranks; 0 if the bandwidth was not
    measured.
    """
    rate = calibration.copy_bytes_per_s
    if not rate:
        return 0.0
    exchange = exchange_of(choices)
    if exchange.is_sharded:
        gathers = 2 if exchange.frees else 1
        count = exchange.num_micro_batches
        reductions = count if exchange.reduce_each else 1
        gathered = count * gathers * volumes.num_elements * volumes.formats.gathered
        scattered = reductions * volumes.num_trained * scattered_bytes(exchange, volumes)
        return 2 * (gathered + scattered) / rate * 1e9
    copied = 0.0 if Settings(choices)[DdpBucketsSetting].bucket_views else 2 * 2 * volumes.all_gradients_bytes
    return (copied + volumes.num_trained * widening_bytes(volumes.formats, exchange)) / rate * 1e9
