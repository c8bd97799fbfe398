"""Weights of a script between its updates, and their distance from the reference's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from steptune.tuner.scripts.seen_weights import changes_between, distances_from


def steps(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    """Steps of one optimizer over one tensor, whose two elements are a number before and a number after each update."""
    made = []
    for before, after in pairs:
        values = {"before": {"w": torch.full((2,), before)}, "after": {"w": torch.full((2,), after)}}
        made.append({"updates": [{"number": 0, "kind": "SGD", **values}]})
    return made


PLAIN = steps((1.0, 0.5), (0.5, 0.25))
CUT = steps((1.0, 0.5), (0.4, 0.25))


def test_a_change_that_the_reference_does_not_make_is_found() -> None:
    found = changes_between([PLAIN, PLAIN], CUT)
    assert found.is_compared
    assert found.score > 1e5
    assert (found.name, found.step) == ("w of SGD 0", 1)


def test_weights_that_nothing_changes_pass() -> None:
    assert changes_between([PLAIN, PLAIN], PLAIN).score == 0.0


def test_a_loop_that_changes_weights_itself_is_not_compared() -> None:
    assert not changes_between([CUT, CUT], CUT).is_compared
    assert not changes_between([CUT, CUT], steps((1.0, 0.5), (0.3, 0.25))).is_compared


def test_a_bound_that_a_run_of_today_s_settings_reaches_may_be_reached_at_any_step() -> None:
    later = steps((1.0, 0.5), (0.5, 0.25), (0.2, 0.1))
    sooner = steps((1.0, 0.5), (0.4, 0.25), (0.25, 0.1))
    assert not changes_between([later, later], sooner).is_compared
    assert not changes_between([PLAIN, PLAIN, CUT], CUT).is_compared, "a disturbed run reaches it"


def test_weights_that_are_not_finite_are_a_change() -> None:
    assert math.isinf(changes_between([PLAIN, PLAIN], steps((1.0, 0.5), (math.nan, 0.25))).score)


def test_distances_are_in_those_of_disturbed_runs() -> None:
    disturbed = [steps((1.0, 0.5), (0.5, 0.26))]
    near, far = distances_from(PLAIN, disturbed, steps((1.0, 0.5), (0.5, 0.29)))
    assert near == 0.0
    assert far == pytest.approx(4.0, rel=1e-4)
