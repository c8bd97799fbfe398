"""The model of all trials: planted effects come back, with errors that are as large as they say."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from search_builders import candidate

from steptune.tuner.search.effects import PRIORS, Difference, EffectModel, Observation

MAIN_EFFECT_SD, OWN_EFFECT_SD = PRIORS[0].main_sd, PRIORS[0].own_sd
BASE = candidate()
A, B, BOTH = candidate(a=1), candidate(b=1), candidate(a=1, b=1)
NOISE_SD = 0.02
UNIT = math.log(800)
"""Logarithm of a rate of 800 samples per second."""


def rates(candidates, gains, *, seed=0, noise_sd=NOISE_SD, level=lambda order: 0.0, unit=UNIT):
    """One observed logarithm of a rate for each candidate, in this order."""
    generator = random.Random(seed)
    return [
        Observation(candidate=c, value=unit + gains[c.key] + level(n) + generator.gauss(0, noise_sd), order=n)
        for n, c in enumerate(candidates, start=1)
    ]


def gains_of(**by_name):
    names = {"base": BASE, "a": A, "b": B, "both": BOTH}
    return {names[name].key: value for name, value in by_name.items()}


class TestPlantedEffects:
    GAINS = gains_of(base=0.0, a=0.15, b=-0.10, both=0.35)

    @pytest.fixture
    def model(self):
        return EffectModel(rates([BASE, A, B, BOTH] * 5, self.GAINS))

    @pytest.mark.parametrize("what", [A, B, BOTH], ids=lambda c: c.label)
    def test_every_effect_is_recovered(self, model, what):
        found = model.difference(what, BASE)
        assert abs(found.mean - self.GAINS[what.key]) < 3 * found.sd
        assert found.sd < NOISE_SD

    def test_what_two_choices_bring_only_together_is_recovered(self, model):
        """0.35 together, 0.05 from the two alone."""
        apart = model.difference(A, BASE).mean + model.difference(B, BASE).mean
        assert model.difference(BOTH, BASE).mean - apart == pytest.approx(0.30, abs=0.05)

    def test_differences_are_antisymmetric(self, model):
        there, back = model.difference(A, B), model.difference(B, A)
        assert there.mean == pytest.approx(-back.mean)
        assert there.sd == pytest.approx(back.sd)

    def test_the_unit_of_the_rate_does_not_matter(self, model):
        other = EffectModel(rates([BASE, A, B, BOTH] * 5, self.GAINS, unit=math.log(1e-3)))
        assert other.difference(A, BASE).mean == pytest.approx(model.difference(A, BASE).mean)

    def test_noise_is_seen_in_replicates(self):
        quiet = EffectModel(rates([BASE, A] * 6, self.GAINS, noise_sd=0.004))
        loud = EffectModel(rates([BASE, A] * 6, self.GAINS, noise_sd=0.06))
        assert quiet.noise_sd < 0.01 < 0.04 < loud.noise_sd
        assert quiet.smallest_detectable() < loud.smallest_detectable()

    def test_a_factor_of_seven_does_not_make_the_others_noisy(self):
        """Sixteen bits on a GPU: what follows is told apart as finely as replicates agree."""
        gains = gains_of(base=0.0, a=1.95, b=0.0, both=1.98)
        model = EffectModel(rates([BASE, BASE, BASE, A, A, BOTH, BOTH, A], gains, noise_sd=0.004))
        found = model.difference(BOTH, A)
        assert model.noise_sd < 0.01
        assert found.mean == pytest.approx(0.03, abs=0.012)
        assert found.probability_above() > 0.95

    def test_what_does_not_feel_the_host_is_told_apart_as_finely_as_it_repeats(self):
        """Eager steps that wait for launches differ by a tenth from start to start, replayed ones hardly at all."""
        gains = gains_of(base=0.0, a=0.6, b=0.0, both=0.65)
        loud = rates([BASE] * 8, gains, noise_sd=0.09)
        calm = [replace(o, calm=True, order=o.order + 8) for o in rates([A, BOTH, A, BOTH], gains, noise_sd=0.003)]
        model = EffectModel([*loud, *calm])
        found = model.difference(BOTH, A)
        assert found.mean == pytest.approx(0.05, abs=0.02)
        assert found.probability_above(0.01) > 0.95
        assert model.noise_sd > 0.04

    def test_calm_trials_alone_are_like_others(self):
        observed = rates([BASE, A] * 4, self.GAINS)
        same = EffectModel([replace(o, calm=True) for o in observed])
        assert same.difference(A, BASE) == EffectModel(observed).difference(A, BASE)


@pytest.mark.parametrize("num_others", [6, 30])
@pytest.mark.parametrize("seed", range(5))
def test_many_choices_that_change_little_do_not_belittle_one_that_changes_much(num_others, seed):
    """Case of loaders in noise: the first made the rate three times the baseline's, what followed changed nothing."""
    generator = random.Random(seed)
    pairs = [(BASE, BASE, 0.0), (BASE, BASE, 0.0), (A, BASE, 1.1)]
    pairs += [(candidate(a=1, **{f"other{n}": 1}), A, generator.gauss(0, 0.03)) for n in range(num_others)]
    noise = [generator.gauss(0, 0.13 * math.sqrt(2)) for _ in pairs]
    observed = [
        Observation(candidate=c, value=value + error, order=n, reference=reference, standard_error=0.03)
        for n, ((c, reference, value), error) in enumerate(zip(pairs, noise, strict=True), start=1)
    ]
    assert EffectModel(observed).difference(A, BASE).mean > 0.9 * (1.1 + noise[2])


def test_a_choice_measured_in_company_says_something_of_it_alone():
    gains = gains_of(base=0.0, b=0.0, both=0.3)
    model = EffectModel(rates([BASE, B, BOTH] * 4, gains, noise_sd=0.005))
    alone = model.difference(A, BASE)
    assert 0.1 < alone.mean < 0.3
    assert alone.sd < math.hypot(MAIN_EFFECT_SD, OWN_EFFECT_SD)


def test_without_any_trial_of_it_a_candidate_has_the_prior():
    model = EffectModel(rates([BASE] * 4, gains_of(base=0.0)))
    unknown = model.difference(A, BASE)
    assert unknown.mean == pytest.approx(0.0, abs=1e-6)
    assert unknown.sd == pytest.approx(math.hypot(MAIN_EFFECT_SD, OWN_EFFECT_SD), rel=1e-3)


class TestDrift:
    """A machine that becomes slower by 1 % a trial."""

    GAINS = gains_of(base=0.0, a=0.10)
    ORDER = (BASE, BASE, BASE, BASE, A, A, BASE, A, BASE, A)

    def observed(self, seed):
        return rates(self.ORDER, self.GAINS, seed=seed, noise_sd=0.005, level=lambda order: -0.01 * order)

    def test_is_noticed_and_taken_out(self):
        errors, naive = [], []
        for seed in range(10):
            observed = self.observed(seed)
            model = EffectModel(observed)
            assert model.drift.sd > 0
            errors.append(abs(model.difference(A, BASE).mean - 0.10))
            means = [np.mean([o.value for o in observed if o.candidate == c]) for c in (A, BASE)]
            naive.append(abs(means[0] - means[1] - 0.10))
        assert np.mean(errors) < 0.5 * np.mean(naive)

    def test_is_not_seen_where_there_is_none(self):
        drifting = [EffectModel(rates(self.ORDER, self.GAINS, seed=seed)).drift.sd > 0 for seed in range(10)]
        assert sum(drifting) <= 3

    def test_ratios_of_trials_that_took_turns_do_not_feel_it(self):
        pairs = [
            Observation(candidate=A, reference=BASE, value=0.10 + noise, order=n)
            for n, noise in enumerate((-0.004, 0.003, 0.001, 0.0), start=1)
        ]
        found = EffectModel(pairs).difference(A, BASE)
        assert found.mean == pytest.approx(0.10, abs=0.01)


@pytest.mark.parametrize(
    ("order", "least"),
    [([BASE, A, B, BOTH] * 6, 0.91), ([BASE] * 4 + [A, B, BOTH, A], 0.80)],
    ids=["six starts of each", "one start of each"],
)
def test_errors_are_about_as_large_as_they_say(order, least):
    """Truths drawn from the prior: 95 % intervals cover them in about 95 of 100 studies with replicates.

    With hardly any, the noise that is taken from the data is often too small and they cover about 85;
    the search may then accept too much, which the confirmation finds out.
    """
    generator = random.Random(1)
    covered = []
    for study in range(90):
        main = {name: generator.gauss(0, MAIN_EFFECT_SD) for name in "ab"}
        own = {c.key: generator.gauss(0, OWN_EFFECT_SD) for c in (A, B, BOTH)}
        gains = gains_of(
            base=0.0,
            a=main["a"] + own[A.key],
            b=main["b"] + own[B.key],
            both=main["a"] + main["b"] + own[BOTH.key],
        )
        model = EffectModel(rates(order, gains, seed=study, noise_sd=0.03))
        for what in (A, B, BOTH):
            found = model.difference(what, BASE)
            covered.append(abs(found.mean - gains[what.key]) < 1.96 * found.sd)
    assert least <= np.mean(covered) <= 0.99


class TestDifference:
    @pytest.mark.parametrize(("mean", "sd"), [(0.05, 0.02), (-0.05, 0.02), (0.0, 0.1), (0.2, 1e-9)])
    def test_expected_improvement_counts_only_what_is_better(self, mean, sd):
        drawn = np.random.default_rng(0).normal(mean, sd, 200_000)
        expected = np.maximum(drawn, 0).mean()
        assert Difference(mean=mean, sd=sd).expected_improvement == pytest.approx(expected, abs=1e-3 * (sd + 0.01))

    def test_probabilities(self):
        difference = Difference(mean=0.02, sd=0.01)
        assert difference.probability_above(0.02) == pytest.approx(0.5)
        assert difference.probability_above(0.0) == pytest.approx(0.97725, abs=1e-4)
        assert difference.ratio == pytest.approx(math.exp(0.02))


class TestPlaces:
    GAINS = gains_of(base=0.0, a=0.15, b=-0.10, both=0.35)

    @classmethod
    def placed(cls, place, candidates, *, level):
        found = rates(candidates, cls.GAINS, level=lambda order: level, seed=len(place))
        return [replace(observation, place=place) for observation in found]

    def test_rates_of_two_places_say_nothing_about_each_other(self):
        """Not that both are equal either: what is known of A is what was known before anything was measured."""
        model = EffectModel([*self.placed("x", [BASE] * 4, level=0.0), *self.placed("y", [A] * 4, level=1.0)])
        found = model.difference(A, BASE)
        prior_sd = math.hypot(MAIN_EFFECT_SD, OWN_EFFECT_SD)
        assert found.sd == pytest.approx(prior_sd, rel=0.05)
        assert abs(found.mean) < 0.1 * prior_sd

    def test_a_baseline_in_both_places_connects_them(self):
        there = self.placed("y", [BASE, A, BASE, A], level=1.0)
        found = EffectModel([*self.placed("x", [BASE] * 4, level=0.0), *there]).difference(A, BASE)
        assert abs(found.mean - 0.15) < 3 * found.sd
        assert found.sd < 2 * NOISE_SD


def test_a_model_like_another_has_its_noise_and_tells_nearly_what_a_fit_of_its_own_tells() -> None:
    gains = gains_of(base=0.0, a=0.4, b=-0.1, both=0.3)
    observed = rates([BASE, A, B, BOTH] * 6, gains, noise_sd=0.01)
    fitted, early = EffectModel(observed), EffectModel(observed[:16])
    like = EffectModel(observed, early)
    assert (like.prior, like.noise_sd, like.drift) == (early.prior, early.noise_sd, early.drift)
    for one in (A, B, BOTH):
        here, there = like.difference(one, BASE), fitted.difference(one, BASE)
        assert abs(here.mean - there.mean) < 0.5 * there.sd
        assert here.sd < early.difference(one, BASE).sd


def test_a_choice_that_came_later_has_the_prior_of_the_earlier_model() -> None:
    observed = rates([BASE, A] * 4 + [B] * 3, gains_of(base=0.0, a=0.4, b=0.2), noise_sd=0.01)
    model = EffectModel(observed, EffectModel(observed[:8]))
    difference = model.difference(B, BASE)
    assert abs(difference.mean - 0.2) < 3 * difference.sd
