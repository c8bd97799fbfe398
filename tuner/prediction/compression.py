"""Bytes that a compression method sends for a bucket of gradients.

| method | sent | by |
|---|---|---|
| fp16, bf16 | 2 bytes per element | all-reduce |
| int8 | 1 byte per element, and a scale of 4 bytes per 256 elements | all-to-all, all-gather |
| one_bit | 1 bit per element, and a scale of 4 bytes per 2048 elements | all-to-all, all-gather |
| powersgd | r (n + m) elements of an n x m matrix; every tensor is taken as a square one | two all-reduces |
| dgc | 8 bytes (value and index) per selected element | all-gather |

The time of compressing itself: `steptune.tuner.training.compression.own_cost`.
"""

from __future__ import annotations

import math

from steptune.tuner.costs.formats import CHOSEN_BYTES, SENT_BYTES
from steptune.tuner.prediction.cluster import Cluster
from steptune.tuner.prediction.volumes import Volumes
from steptune.tuner.records import Choice

THIN_BYTES = 4.0


def sending_ns(choice: Choice, num_elements: float, volumes: Volumes, cluster: Cluster) -> float:
    """Return the time to send a compressed bucket with collectives that span all ranks."""
    method = str(choice["method"])
    if method in ("fp16", "bf16"):
        return cluster.all_reduce_ns(SENT_BYTES[method] * num_elements)
    if method in ("int8", "one_bit"):
        sent_bytes = SENT_BYTES[method] * num_elements
        return cluster.all_to_all_ns(sent_bytes) + cluster.all_gather_ns(sent_bytes)
    if method == "powersgd":
        thin_bytes = THIN_BYTES * int(choice["rank"] or 1) * thin_rows(num_elements, volumes)
        return 2 * cluster.all_reduce_ns(min(thin_bytes, THIN_BYTES * num_elements))
    assert method == "dgc", method
    chosen = math.ceil(float(choice["ratio"] or 0) * num_elements)
    return cluster.all_gather_ns(CHOSEN_BYTES * chosen * cluster.num_ranks)


def thin_rows(num_elements: float, volumes: Volumes) -> float:
    """Return the total number of rows in one of the two factors into which PowerSGD splits each tensor of a bucket."""
    mean_tensor = volumes.num_elements / volumes.num_tensors
    return num_elements / mean_tensor * math.sqrt(mean_tensor)


def sent_part_between(method: str, volumes: Volumes) -> float:
    """Return the share of the bytes that is sent between hosts if gradients are compressed there only."""
    return SENT_BYTES[method] / volumes.formats.gradient
