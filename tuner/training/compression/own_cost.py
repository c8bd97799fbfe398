"""Compute time of compression without sending: measured, or estimated from memory traffic and launches.

`MEMORY_BYTES` is what the operators of a technique read and write of one FP32 element, over the measured bandwidth of a
large copy; `LAUNCHES` is how many operators run for a bucket, each of which takes the host `LAUNCH_NS`. With their
kernels `int8` pads (12 bytes), encodes (5), averages and encodes again (1, and 9 over the ranks: of four here) and
decodes (21); `dgc` compensates (20), selects (4) and writes what arrived to the gradients (12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steptune.tuner.records import Calibration

MEMORY_BYTES = {"fp16": 16.0, "bf16": 16.0, "int8": 41.0, "one_bit": 130.0, "powersgd": 48.0, "dgc": 36.0}
LAUNCHES = {"fp16": 3, "bf16": 3, "int8": 8, "one_bit": 40, "powersgd": 136, "dgc": 60}
LAUNCH_NS = 6_000.0
"""Host time per small operator on CUDA, in nanoseconds: 5 to 7 us were measured on hosts of H100 and H200."""


@dataclass(frozen=True, kw_only=True)
class OwnCost:
    """Time that compression takes without sending: a part per element and a part per call."""

    ns_per_element: float
    call_ns: float

    def of(self, num_elements: float) -> float:
        return self.call_ns + num_elements * self.ns_per_element


def own_costs(calibration: Calibration, measured: Mapping[str, OwnCost] | None = None) -> dict[str, OwnCost]:
    """Return the compute cost of each method: measured, or estimated. Without a measured bandwidth only the launches
    are included.
    """
    rate = calibration.copy_bytes_per_s
    counted = {
        method: OwnCost(ns_per_element=num_bytes / rate * 1e9 if rate else 0.0, call_ns=LAUNCHES[method] * LAUNCH_NS)
        for method, num_bytes in MEMORY_BYTES.items()
    }
    return {**counted, **(measured or {})}
