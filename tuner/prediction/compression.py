"""What a compression sends of a bucket, and what compressing takes by itself.

| method | sent | by |
|---|---|---|
| fp16, bf16 | 2 bytes of an element | all-reduce |
| int8 | 1 byte, and a scale of 4 for 256 elements | all-to-all, all-gather |
| one_bit | 1 bit, and a scale of 4 bytes for 2048 elements | all-to-all, all-gather |
| powersgd | r (n + m) elements of an n x m matrix; every tensor is taken as a square one | two all-reduces |
| dgc | value and place, 8 bytes, of its share of the elements | all-gather |

Compressing by itself is counted, not measured, unless somebody has measured it: `MEMORY_BYTES` is what the operators in
`tuner.training.compression` read and write of one FP32 element, over the measured bandwidth of a large copy;
`LAUNCHES` is how many operators run for a bucket, each of which takes the host `LAUNCH_NS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.prediction.cluster import Cluster
from tuner.prediction.volumes import Volumes
from tuner.records import Calibration, Choice

SENT_BYTES = {"fp16": 2.0, "bf16": 2.0, "int8": 1 + 4 / 256, "one_bit": 1 / 8 + 4 / 2048}
"""Of one element. Of the last two twice: to whom averages, and back."""
CHOSEN_BYTES = 8.0
"""Value and place of an element of `dgc`."""
THIN_BYTES = 4.0
MEMORY_BYTES = {"fp16": 16.0, "bf16": 16.0, "int8": 62.0, "one_bit": 130.0, "powersgd": 48.0, "dgc": 56.0}
LAUNCHES = {"fp16": 3, "bf16": 3, "int8": 24, "one_bit": 40, "powersgd": 136, "dgc": 60}
LAUNCH_NS = 6_000.0
"""Host time of one small operator on CUDA: 5 to 7 us were measured on hosts of H100 and H200."""


@dataclass(frozen=True, kw_only=True)
class OwnCost:
    """What compressing takes without sending anything: so much an element, and a call."""

    ns_per_element: float
    call_ns: float

    def of(self, num_elements: float) -> float:
        return self.call_ns + num_elements * self.ns_per_element


def own_costs(calibration: Calibration, measured: Mapping[str, OwnCost] | None = None) -> dict[str, OwnCost]:
    """By method: measured, or counted; without a measured bandwidth only the calls count."""
    rate = calibration.copy_bytes_per_s
    counted = {
        method: OwnCost(ns_per_element=num_bytes / rate * 1e9 if rate else 0.0, call_ns=LAUNCHES[method] * LAUNCH_NS)
        for method, num_bytes in MEMORY_BYTES.items()
    }
    return {**counted, **(measured or {})}


def sending_ns(choice: Choice, num_elements: float, volumes: Volumes, cluster: Cluster) -> float:
    """Of a bucket over all ranks at once."""
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
    """Rows of one of the two factors of a bucket's tensors, for rank 1."""
    mean_tensor = volumes.num_elements / volumes.num_tensors
    return num_elements / mean_tensor * math.sqrt(mean_tensor)


def sent_part_between(method: str, volumes: Volumes) -> float:
    """Of the bytes between hosts, where parts of gradients are compressed there only."""
    return SENT_BYTES[method] / volumes.gradient_bytes
