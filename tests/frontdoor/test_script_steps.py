"""The step is the shortest period of the optimizers' steps, whatever their order and whatever comes between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.scripts.agent.steps import (
    BACKWARDS_BESIDE_OPTIMIZER,
    BACKWARDS_WITHOUT_OPTIMIZER,
    PATIENCE,
    StepFinder,
)


def ends(finder: StepFinder, marks: Sequence[int | str], exist: Sequence[int]) -> list[int]:
    """Positions of the marks with which a step ends: a number is a step of that optimizer, "n" a batch."""
    found = []
    for position, mark in enumerate(marks):
        if isinstance(mark, int):
            if finder.optimizer_stepped(mark, exist):
                found.append(position)
        else:
            finder.batch()
    return found


turns = st.lists(st.integers(1, 5), min_size=2, max_size=3)
"""How often each of several optimizers steps before the next one does."""
periods = st.one_of(st.just([0]), turns.map(lambda counts: [n for n, count in enumerate(counts) for _ in range(count)]))


@given(periods, st.data())
def test_every_period_is_found_and_ends_where_new_batches_come(period: list[int], data: st.DataObject) -> None:
    last = data.draw(st.integers(0, len(period) - 1))
    marks: list[int | str] = []
    for number in range(8 * len(period)):
        marks.append(period[number % len(period)])
        if number % len(period) == last:
            marks.append("n")
    finder = StepFinder()

    found = ends(finder, marks, sorted(set(period)))

    per_step = len(period) + 1
    assert finder.pattern == tuple(period[last + 1 :] + period[: last + 1])
    assert all(position % per_step == last for position in found)
    assert [b - a for a, b in itertools.pairwise(found)] == [per_step] * (len(found) - 1)
    assert len(found) >= 3, "at most four periods are needed to find it"


def test_a_critic_that_steps_alone_at_first_is_no_period_of_one() -> None:
    finder = StepFinder()

    found = ends(finder, ([0] * 5 + [1]) * 5, [0, 1])

    assert finder.pattern == (0, 0, 0, 0, 0, 1)
    assert [position % 6 for position in found] == [5] * len(found)


def test_an_optimizer_that_never_steps_is_left_out_after_a_while() -> None:
    finder = StepFinder()

    found = ends(finder, [0] * (PATIENCE + 4), [0, 1])

    assert finder.pattern == (0,)
    assert found[0] == PATIENCE - 1


def test_an_irregular_step_does_not_shift_the_ends_of_later_ones() -> None:
    finder = StepFinder()

    found = ends(finder, [0, 1] * 4 + [0, 0, 1] + [0, 1] * 3, [0, 1])

    assert finder.pattern == (0, 1)
    assert found == [5, 7, 10, 12, 14, 16]


@pytest.mark.parametrize(
    ("num_optimizers", "needed"), [(0, BACKWARDS_WITHOUT_OPTIMIZER), (1, BACKWARDS_BESIDE_OPTIMIZER)]
)
def test_without_steps_of_optimizers_each_backward_pass_is_a_step(num_optimizers: int, needed: int) -> None:
    finder = StepFinder()

    found = [number for number in range(1, needed + 3) if finder.backward_ended(num_optimizers)]

    assert found == [needed, needed + 1, needed + 2]


def test_an_optimizer_that_comes_late_takes_over() -> None:
    finder = StepFinder()
    for _ in range(BACKWARDS_WITHOUT_OPTIMIZER):
        finder.backward_ended(0)

    found = ends(finder, [0] * 6, [0])

    assert found == [2, 3, 4, 5]
    assert not finder.backward_ended(1)


def test_a_second_training_is_found_although_the_first_optimizers_still_exist() -> None:
    finder = StepFinder()
    ends(finder, [0] * 8, [0])

    found = ends(finder, [1, 2] * 8, [0, 1, 2])

    assert finder.pattern == (1, 2)
    assert found[-3:] == [11, 13, 15]
