"""The Gaussian model of a step: what it learns from profiles and measured steps."""

from dataclasses import replace

import numpy as np
import pytest

from steptune.tuner.search.gaussian import Measured, Prior, StepModel, level_kernel

LEVELS = [2, 2, 5]
"""Number of levels of each parameter: one acts on the first category, two on the second, the last of them ordered."""
RANKS = np.linspace(0, 1, 5)


def prior(mean=0.0):
    acts = [np.zeros((n, 2), dtype=bool) for n in LEVELS]
    for parameter, category in enumerate((0, 1, 1)):
        acts[parameter][1:, category] = True
    kernels = [level_kernel(n, RANKS if n == 5 else None) for n in LEVELS]
    return Prior(kernels=kernels, acts=acts, means=[mean * act for act in acts], most=[np.ones(n) for n in LEVELS])


def measured(*starts):
    """Measurements of runs, each given as (levels, seconds by category)."""
    levels = np.array([levels for levels, _ in starts], dtype=np.int64)
    profiles = np.array([seconds for _, seconds in starts], dtype=np.float64)
    n = len(starts)
    return Measured(
        levels=levels,
        log_s=np.log(profiles.sum(1)),
        errors=np.full(n, 0.001),
        calm=np.zeros(n, dtype=bool),
        groups=np.arange(n),
        places=np.zeros(n, dtype=np.int64),
        profiles=profiles,
        profiled=np.arange(n),
    )


def expected(model, *levels):
    return np.exp(model.believe(np.array(levels, dtype=np.int64)).mean)


def test_effects_of_two_categories_are_put_together():
    """Half of one and half of the other were seen alone: both leave half of the step."""
    model = StepModel(prior(), measured(((0, 0, 0), (6, 4)), ((1, 0, 0), (3, 4)), ((0, 1, 0), (6, 2))))
    assert expected(model, (1, 1, 0))[0] == pytest.approx(5.0, rel=0.08)


def test_an_effect_counts_with_the_share_that_its_category_has():
    """Where the first category is small already, halving the second brings more of the step."""
    model = StepModel(prior(), measured(((0, 0, 0), (9, 1)), ((1, 0, 0), (1, 1)), ((0, 1, 0), (9, 0.5))))
    large, small = expected(model, (0, 1, 0), (1, 1, 0)) / expected(model, (0, 0, 0), (1, 0, 0))
    assert small < 0.85 < 0.9 < large


def test_neighbours_of_an_ordered_choice_are_alike():
    model = StepModel(prior(), measured(((0, 0, 0), (5, 5)), ((0, 0, 3), (5, 2))))
    near, far = model.believe(np.array([(0, 0, 4), (0, 0, 1)])).mean
    assert near < far


def test_what_is_expected_moves_the_mean_and_what_is_measured_moves_it_back():
    start = ((0, 0, 0), (5, 5))
    assert expected(StepModel(prior(-0.5), measured(start)), (1, 0, 0)) < 10.0
    told = StepModel(prior(-0.5), measured(start, ((1, 0, 0), (5, 5)), ((1, 0, 0), (5, 5))))
    assert expected(told, (1, 0, 0))[0] == pytest.approx(10.0, rel=0.03)


def test_a_measured_configuration_is_less_uncertain_than_an_untried_one():
    model = StepModel(prior(), measured(((0, 0, 0), (5, 5)), ((1, 0, 0), (4, 5))))
    known, unknown = model.believe(np.array([(1, 0, 0), (0, 1, 0)])).variance
    assert known < unknown / 4


def test_a_start_without_a_profile_counts_as_it_was_measured_however_much_faster_it_is():
    """Times below what is told apart from none are no part of the step."""
    fast = ((1, 1, 0), (0.3, 0.2))
    told = measured(((0, 0, 0), (6, 4)), fast, fast)
    model = StepModel(prior(), replace(told, profiles=told.profiles[:2], profiled=told.profiled[:2]))
    assert expected(model, (1, 1, 0))[0] == pytest.approx(0.5, rel=0.02)
    assert model.start_noise(calm=False) <= 0.012


@pytest.mark.parametrize("is_profiled", [True, False])
@pytest.mark.parametrize("factor", [5, 10, 70, 1000])
def test_a_measured_configuration_is_believed_however_much_faster_it_is(factor, is_profiled):
    """On an overloaded host today's settings took 70 times as long, and 30,676 times were believed."""
    generator = np.random.default_rng(0)
    for _ in range(10):
        before, after = 10 * generator.dirichlet([1, 1]), 10 / factor * generator.dirichlet([1, 1])
        told = measured(((0, 0, 0), before), *[((1, 1, 0), after)] * 2)
        known = 3 if is_profiled else 1
        model = StepModel(prior(), replace(told, profiles=told.profiles[:known], profiled=told.profiled[:known]))
        assert expected(model, (1, 1, 0))[0] == pytest.approx(10 / factor, rel=0.02)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("fast", [0.6, 0.32, 1.6])
def test_a_configuration_that_was_never_profiled_is_believed_as_it_was_measured(count, fast):
    """Which category has become shorter is not known, but their sum is."""
    told = measured(((0, 0, 0), (1.2, 0.3)), *[((1, 0, 0), (fast - 0.3, 0.3))] * count)
    model = StepModel(prior(), replace(told, profiles=told.profiles[:1], profiled=told.profiled[:1]))
    assert expected(model, (1, 0, 0))[0] == pytest.approx(fast, rel=0.05)
