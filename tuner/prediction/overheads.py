"""What ways to communicate add to a rank's compute: copies of gradients and of parameters.

DDP copies gradients into buckets and back unless they are views of them (`bucket_views`). FSDP copies what it gathers
out of one buffer, and gradients into another. Each copy reads and writes: it takes its bytes over the measured
bandwidth of a large copy.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.prediction.volumes import Volumes
from tuner.records import Calibration, Choice
from tuner.strategies.reduction import FSDP


def frees(sharding: Choice) -> bool:
    """Parameters are freed after the forward pass, and gathered again."""
    return sharding["mode"] == "full" or (sharding["mode"] == "hybrid" and bool(sharding["reshard"]))


def copies_ns(choices: Mapping[str, Choice], volumes: Volumes, calibration: Calibration) -> float:
    """Of a step on several ranks, in its backward pass; nothing where the bandwidth was not measured."""
    rate = calibration.copy_bytes_per_s
    if not rate:
        return 0.0
    sharding = choices["sharding"]
    if sharding["mode"] in FSDP:
        gathers = 2 if frees(sharding) else 1
        copied_bytes = volumes.num_elements * (gathers * volumes.gathered_bytes + volumes.reduced_bytes)
        return 2 * copied_bytes * _micro_batches(choices) / rate * 1e9
    if choices["ddp_buckets"]["bucket_views"]:
        return 0.0
    return 2 * 2 * volumes.all_gradients_bytes / rate * 1e9


def _micro_batches(choices: Mapping[str, Choice]) -> int:
    return int(choices["micro_batch"]["num_micro_batches"] or 1)
