"""Weights in a script's guarded steps: their distance from the reference's weights, and the weights before and after
each update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from steptune.tuner.guard.between import Updates
from steptune.tuner.guard.gradients import distances, measure_distances

Seen = dict[str, Any]


def weights_after(steps: Sequence[Seen]) -> list[dict[str, torch.Tensor]]:
    """Return the weights after each step, by optimizer and position in it."""
    return [
        {f"{update['number']}.{name}": value for update in step["updates"] for name, value in update["after"].items()}
        for step in steps
    ]


def distances_from(
    reference: Sequence[Seen], disturbed: Sequence[Sequence[Seen]], found: Sequence[Seen]
) -> list[float]:
    """Return the distance of a candidate's weights from the reference's after each step, as a multiple of a disturbed
    run's.
    """
    wanted = weights_after(reference)
    noise = measure_distances(wanted, [weights_after(run) for run in disturbed])
    return distances(wanted, noise, weights_after(found))


def weights_around(steps: Sequence[Seen]) -> Updates:
    """Return the weights before and after each update, by optimizer."""
    found: dict[str, list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]] = {}
    for step in steps:
        for update in step["updates"]:
            around = update["before"], update["after"]
            found.setdefault(f"{update['kind']} {update['number']}", []).append(around)
    return found
