"""Sensitivity of a step to its host: a device that hardly ever waits repeats better than one waiting for launches."""

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
"""Share of the step that a device may wait for its host, of a trial that does not feel the host."""


def has_device(situation: Situation) -> bool:
    """Say whether the host is not itself the device: on a CPU there is nobody who could wait for it."""
    return situation.environment.hardware.device_kind != "cpu"


def is_calm(situation: Situation) -> bool:
    """Say whether a profile shows a device that hardly ever waited for its host; never on a CPU."""
    return has_device(situation) and situation.time_ns(WAITING) < CALM * situation.step_ns
