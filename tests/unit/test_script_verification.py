"""Losses of a changed script beside those of the unchanged one."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
from builders import sample_result

from steptune.service.script_verification import good_results
from steptune.tuner.records import Gain, Interval
from steptune.tuner.records.trials import Failure, FailureKind
from steptune.tuner.scripts.failures import last_line_of
from steptune.tuner.scripts.verification import compare_losses

GAIN = Gain(
    ratio=1.2, interval=Interval(low=1.1, high=1.3), prediction=Interval(low=1, high=2), num_blocks=2, num_finalists=1
)
FALLING = [2.0 - step / 100 for step in range(100)]


def scaled(losses: list[float], factor: float) -> list[float]:
    return [factor * loss for loss in losses]


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        pytest.param(FALLING, True, id="equal"),
        pytest.param(scaled(FALLING, 1.001), True, id="rounding"),
        pytest.param(scaled(FALLING, 1.2), False, id="higher"),
        pytest.param([2.0 - step / 50 for step in range(100)], False, id="lower"),
        pytest.param([*FALLING[:99], math.nan], False, id="not a number"),
    ],
)
def test_losses_agree_within_rounding_and_a_part_of_their_fall(changed: list[float], *, same: bool) -> None:
    found = compare_losses([FALLING, FALLING], [changed, changed], GAIN)

    assert found.same is same
    assert found.num_losses == 100


def test_a_script_that_does_not_repeat_itself_is_given_its_own_scatter() -> None:
    other = scaled(FALLING, 1.1)

    alike = compare_losses([FALLING, other], [scaled(FALLING, 1.08), other], GAIN)
    apart = compare_losses([FALLING, other], [scaled(FALLING, 2.0), scaled(FALLING, 2.0)], GAIN)

    assert alike.same
    assert not apart.same


def test_other_random_numbers_of_the_samples_are_no_other_training() -> None:
    """Another number of workers augments every sample differently; runs of one script repeat themselves."""
    rejected = 0
    for seed in range(200):
        draw = random.Random(seed)
        today, changed = ([7.0 - step / 500 + draw.gauss(0, 0.1) for step in range(17)] for _ in range(2))
        rejected += not compare_losses([today, today], [changed, changed], GAIN).same
    assert rejected <= 20

    def noisy(draw: random.Random, factor: float) -> list[float]:
        return [factor * (7.0 - step / 500) + draw.gauss(0, 0.1) for step in range(100)]

    draw = random.Random(1)
    assert not compare_losses([noisy(draw, 1.0)] * 2, [noisy(draw, 1.03)] * 2, GAIN).same


@pytest.mark.parametrize("num", [8, 17, 100])
def test_a_jump_makes_no_tolerance_for_itself(num: int) -> None:
    flat = [2.0] * num
    assert not compare_losses([flat, flat], [[*flat[:-1], 32.0]] * 2, GAIN).same


def test_starts_of_other_lengths_are_compared_as_far_as_all_go() -> None:
    assert compare_losses([FALLING, FALLING[:40]], [FALLING, FALLING[:60]], GAIN).num_losses == 40


def test_without_a_backward_pass_nothing_is_compared_and_nothing_is_verified() -> None:
    found = compare_losses([[], []], [[], []], GAIN)

    assert found.num_losses == 0
    assert not found.same
    assert "not compared" in found.reason


def test_an_unchanged_script_without_a_finite_loss_is_not_laid_on_the_changed_one() -> None:
    broken = [*FALLING[:99], math.nan]

    found = compare_losses([broken, broken], [broken, broken], GAIN)

    assert "the loss of the unchanged script is not finite" in found.reason


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ("Traceback\nValueError: no batch\n\nsteptune: not changed: num_threads.\n", "ValueError: no batch"),
        ("steptune: nothing was changed\n", "steptune: nothing was changed"),
        ("\n", ""),
    ],
)
def test_a_scripts_own_error_is_told_before_what_was_not_changed(said: str, last: str) -> None:
    assert last_line_of(said) == last


def test_a_verification_right_after_a_study_counts_the_scatter_of_its_good_runs() -> None:
    """Runs that failed, and runs of other candidates, say nothing about it."""
    good, failed = sample_result(), sample_result(failure=Failure(kind=FailureKind.CRASH, phase="build", message=""))
    trials = [SimpleNamespace(candidate=each.candidate, result=each) for each in (good, failed, good)]
    store = SimpleNamespace(trials=lambda study_id: [*trials, SimpleNamespace(candidate=good.candidate, result=None)])
    assert good_results(store, "study") == {good.candidate.key: [good, good]}
