"""Choices to blame for configurations that did not run."""

import numpy as np

from steptune.tuner.search.blame import Blame, Room

LEVELS = [2, 3, 2]


def rows(*levels):
    return np.array(levels, dtype=np.int64).reshape(len(levels), 3)


def test_a_choice_that_failed_alone_is_likely_to_fail_elsewhere_and_not_certain_to():
    blame = Blame(LEVELS, ran=rows((0, 0, 0), (0, 2, 1)), failed=rows((1, 0, 0)))
    alone, elsewhere, other = blame.runs(rows((1, 0, 0), (1, 2, 1), (0, 1, 0)))
    assert alone < 0.2
    assert alone < elsewhere < other


def test_what_ran_elsewhere_is_not_blamed():
    blame = Blame(LEVELS, ran=rows((0, 0, 0), (1, 0, 0), (0, 1, 0)), failed=rows((1, 1, 0)))
    single, pair = blame.runs(rows((1, 0, 0), (1, 1, 0)))
    assert single == 1.0
    assert pair < 0.1


def test_two_failures_with_one_choice_in_common_blame_it_more_than_the_others():
    once = Blame(LEVELS, ran=rows((0, 0, 0)), failed=rows((1, 1, 0)))
    twice = Blame(LEVELS, ran=rows((0, 0, 0)), failed=rows((1, 1, 0), (1, 2, 0)))
    assert twice.runs(rows((1, 0, 0)))[0] < once.runs(rows((1, 0, 0)))[0]


def test_a_failure_that_names_its_choice_leaves_the_others_unsuspected():
    """But for its pairs: beside another change, the named choice may run."""
    ran, failed = rows((0, 0, 0)), rows((1, 1, 1))
    guessed, named = Blame(LEVELS, ran, failed), Blame(LEVELS, ran, failed, [0])
    others = rows((0, 1, 1))
    assert guessed.runs(others)[0] < 0.7 < named.runs(others)[0]
    choice, again = rows((1, 0, 0)), rows((1, 1, 1))
    assert named.runs(choice)[0] < guessed.runs(choice)[0]
    assert named.runs(again)[0] < named.runs(choice)[0]


def test_memory_adds_up():
    """Each of two choices needs 4 of 20 alone and both fitted; with a third that ran out, the cheaper pair may fit."""
    ran = rows((0, 0, 0), (1, 0, 0), (0, 1, 0))
    room = Room(LEVELS, ran, np.array([20.0, 24.0, 21.0]), rows((1, 0, 1)))
    with_the_large, with_the_small = room.fits(rows((1, 1, 1), (0, 1, 1)))
    assert with_the_large < 0.2 < with_the_small


def test_while_nothing_ran_out_of_memory_everything_fits():
    assert (Room(LEVELS, rows((0, 0, 0)), np.array([20.0]), rows()).fits(rows((1, 2, 1))) == 1).all()


def test_what_the_reference_saves_is_needed_again_without_it():
    """Nothing is known but that the reference fits, and one without the saving did not: with another such one beside
    it, neither is tried for long.
    """
    ran, directions = rows((0, 0, 0)), [[0, 0], [0, 0, 1], [0, 0]]
    peaks = np.array([20.0])
    saving, other = (Room(LEVELS, ran, peaks, rows((0, 2, 0)), d).fits(rows((1, 2, 1)))[0] for d in (directions, []))
    assert saving < other < 0.5
    twice = Room(LEVELS, ran, peaks, rows((0, 2, 0), (1, 2, 0)), directions).fits(rows((1, 2, 1)))[0]
    assert twice < saving


def test_each_that_ran_out_of_memory_makes_the_next_less_likely_to_fit():
    ran, peaks = rows((0, 0, 0), (1, 0, 0), (0, 0, 1)), np.array([20.0, 20.2, 20.1])
    failed = [(0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)]
    chances = [Room(LEVELS, ran, peaks, rows(*failed[:n])).fits(rows((1, 1, 1)))[0] for n in range(1, 4)]
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 0.1


def test_a_named_choice_that_ran_with_all_others_leaves_the_failure_to_them():
    ran = rows((0, 0, 0), (1, 1, 0), (1, 0, 1))
    named = Blame(LEVELS, ran, rows((1, 1, 1)), [0])
    assert named.runs(rows((1, 1, 1)))[0] < 0.3 < named.runs(rows((1, 1, 0)))[0]
