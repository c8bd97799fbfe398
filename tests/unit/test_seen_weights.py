"""Distance of a script's weights from the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steptune.tuner.scripts.seen_weights import distances_from


def steps(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    """Steps of one optimizer over one tensor, whose two elements are a number before and a number after each update."""
    made = []
    for before, after in pairs:
        values = {"before": {"w": torch.full((2,), before)}, "after": {"w": torch.full((2,), after)}}
        made.append({"updates": [{"number": 0, "kind": "SGD", **values}]})
    return made


PLAIN = steps((1.0, 0.5), (0.5, 0.25))


def test_distances_are_in_those_of_disturbed_runs() -> None:
    disturbed = [steps((1.0, 0.5), (0.5, 0.26))]
    near, far = distances_from(PLAIN, disturbed, steps((1.0, 0.5), (0.5, 0.29)))
    assert near == 0.0
    assert far == pytest.approx(4.0, rel=1e-4)
