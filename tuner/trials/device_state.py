"""State of a device before and after a window, and the decision whether the window is valid.

A window is void if the device was slowed down by heat, by the hardware's own protection or power brake, or by another
power limit than in the trial's first window, or if it was shared with others. Effects of the work itself do not void
it: a device at its power limit (`power cap`) lowers its clock as it does in any long training, and a candidate that
draws more power is rightly slower.

Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from steptune.tuner.records import DeviceReading

LIMITS: dict[int, str] = {
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock",
}
"""Names of the limits on the clocks, by bit of NVML's clocks event reasons. The bit for an idle device (0x1) is left
out, because at a window's edge it means nothing.
"""
HARMFUL = frozenset(
    {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake"}
)
MAX_SLOWED_SHARE = 0.01
MAX_FOREIGN_SHARE = 0.05
POWER_LIMIT_TOLERANCE_W = 1.0


@dataclass(frozen=True, kw_only=True)
class Use:
    """Use of a device by one process since a given time.

    Attributes:
        share: Share of the device's time, 0 to 1.
        at_us: Time of the driver's last sample (microseconds since 1970).
    """

    pid: int
    share: float
    at_us: int


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """Readings of a device at one moment; None where the driver does not report a value.

    Attributes:
        at_us: Time of the reading in microseconds since 1970, the clock of `Use`.
        reasons: Active limits, as bits of `LIMITS`.
        energy_mj: Energy used since the driver was loaded, in millijoules.
        thermal_ns: Time for which heat slowed the device down since the driver was loaded.
        uses: Use by process over the window that ends with this reading; None where that is not known.
    """

    at_us: int
    sm_clock_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    reasons: int = 0
    energy_mj: int | None = None
    thermal_ns: int | None = None
    uses: tuple[Use, ...] | None = field(default=None)


def limits_of(reasons: int) -> tuple[str, ...]:
    """Return the names of the active limits on the clock."""
    return tuple(name for bit, name in LIMITS.items() if reasons & bit)


def reading_between(before: DeviceState, after: DeviceState, own: frozenset[int]) -> DeviceReading:
    """Return the device reading of a window, computed from the device's states before and after it.

    Args:
        own: Process ids of the study.
    """
    elapsed_us = max(1, after.at_us - before.at_us)
    energy_mj = _difference(before.energy_mj, after.energy_mj)
    slowed_ns = _difference(before.thermal_ns, after.thermal_ns)
    return DeviceReading(
        sm_clock_mhz=after.sm_clock_mhz,
        power_w=after.power_w if not energy_mj else 1000 * energy_mj / elapsed_us,
        power_limit_w=after.power_limit_w,
        temperature_c=after.temperature_c,
        limits=limits_of(before.reasons | after.reasons),
        slowed_share=None if slowed_ns is None else min(1.0, slowed_ns / (1000 * elapsed_us)),
        foreign_share=_foreign_share(before, after, own),
    )


def why_void(reading: DeviceReading, first_power_limit_w: float | None) -> str | None:
    """Return the reason why a window is void, or None.

    Args:
        first_power_limit_w: Power limit in the trial's first window.
    """
    if reading.slowed_share is not None and reading.slowed_share > MAX_SLOWED_SHARE:
        return f"the device was slowed down by heat for {reading.slowed_share:.0%} of the window{_at(reading)}"
    harmful = [name for name in reading.limits if name in HARMFUL]
    if harmful:
        return f"the device's clock was throttled: {', '.join(harmful)}{_at(reading)}"
    if reading.foreign_share is not None and reading.foreign_share > MAX_FOREIGN_SHARE:
        return f"other processes used {reading.foreign_share:.0%} of the device"
    limit, first = reading.power_limit_w, first_power_limit_w
    if limit is not None and first is not None and abs(limit - first) > POWER_LIMIT_TOLERANCE_W:
        return f"the device's power limit was changed from {first:.0f} W to {limit:.0f} W"
    return None


def _at(reading: DeviceReading) -> str:
    return "" if reading.temperature_c is None else f" (at {reading.temperature_c} °C)"


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


def _foreign_share(before: DeviceState, after: DeviceState, own: frozenset[int]) -> float | None:
    """Return the share of the window in which other processes used the device: the sum of each process's mean over its
    samples. None without samples.

    The driver samples each process at different times, so that one that ended within the window counts in full.
    """
    if after.uses is None:
        return None
    shares: dict[int, list[float]] = {}
    for use in after.uses:
        if use.at_us > before.at_us:
            shares.setdefault(use.pid, []).append(use.share)
    if not shares:
        return None
    return min(1.0, sum(fmean(taken) for pid, taken in shares.items() if pid not in own))
