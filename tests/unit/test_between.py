"""Changes of weights between updates: those that today's settings do not make, and those that are missing."""

from __future__ import annotations

import math

import pytest
import torch

from steptune.tuner.guard.between import Between, Moves, Updates, joined, moves_of, worst_between


def updates(*pairs: tuple[float, float]) -> Updates:
    """Updates of one tensor, whose two elements are a number before and a number after each."""
    return {"SGD 0": [({"w": torch.full((2,), before)}, {"w": torch.full((2,), after)}) for before, after in pairs]}


PLAIN = updates((1.0, 0.5), (0.5, 0.25))
CUT = updates((1.0, 0.5), (0.4, 0.25))


def worst(*known: Updates, found: Updates) -> Between:
    return worst_between(found, moves_of(known))


def test_a_change_that_the_reference_does_not_make_is_found() -> None:
    found = worst(PLAIN, PLAIN, found=CUT)
    assert found.score > 1e5
    assert (found.name, found.update) == ("w of SGD 0", 1)


def test_weights_that_nothing_changes_pass() -> None:
    assert worst(PLAIN, PLAIN, found=PLAIN).score == 0.0


@pytest.mark.parametrize("now", [0.4, 0.3])
def test_a_loop_that_changes_weights_itself_may_do_so(now: float) -> None:
    assert worst(CUT, CUT, found=updates((1.0, 0.5), (now, 0.25))) == Between()


def test_a_loop_that_always_changes_weights_itself_may_not_leave_them_alone() -> None:
    found = worst(CUT, CUT, found=PLAIN)
    assert math.isinf(found.score)
    assert (
        found.detail
        == "w of SGD 0 does not change between updates; with today's settings it changes between all of them"
    )


def test_a_bound_that_a_run_of_todays_settings_reaches_may_be_reached_at_any_step() -> None:
    later = updates((1.0, 0.5), (0.5, 0.25), (0.2, 0.1))
    sooner = updates((1.0, 0.5), (0.4, 0.25), (0.25, 0.1))
    never = updates((1.0, 0.5), (0.5, 0.25), (0.25, 0.1))
    assert worst(later, later, found=sooner) == Between()
    assert worst(later, later, found=never) == Between()
    assert worst(PLAIN, PLAIN, CUT, found=CUT) == Between(), "a disturbed run reaches it"


def test_weights_that_are_not_finite_are_a_change() -> None:
    assert math.isinf(worst(PLAIN, found=updates((1.0, 0.5), (math.nan, 0.25))).score)


def test_moves_of_runs_are_joined() -> None:
    assert joined(moves_of([CUT]), moves_of([PLAIN])) == moves_of([CUT, PLAIN]) == Moves(ever=("w of SGD 0",))
