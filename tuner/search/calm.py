"""Sensitivity of a step to its host: times are more repeatable if the device hardly ever waits for launches."""

from __future__ import annotations

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.costs.categories import Category

WAITING = (
    Category.HOST,
    Category.LAUNCH_LATENCY,
    Category.OPTIMIZER_HOST,
    Category.SYNCHRONISATION,
    Category.DATA_WAIT,
)
CALM = 0.1
"""Maximum share of the step in which the device waits for its host, for a trial to count as insensitive to the host."""


def has_device(situation: Situation) -> bool:
    """Say whether compute runs on an accelerator; on a CPU the host itself is the device."""
    return situation.environment.hardware.device_kind != "cpu"


def is_calm(situation: Situation) -> bool:
    """Say whether a profile shows a device that hardly ever waited for its host; always False on a CPU."""
    return has_device(situation) and situation.time_ns(WAITING) < CALM * situation.step_ns
