"""Means and intervals of noisy rates, on data whose truth is known."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from builders import sample_result, sample_window
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.estimates import (
    Estimate,
    log_rate,
    log_ratio,
    plain_mean,
    restart_s_per_step,
    student_quantile,
    trimmed_mean,
    units_per_s,
)
from steptune.tuner.records import TrialResult

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


def result_of(step_s: Sequence[float], rounds: Sequence[int] | None = None, **changes) -> TrialResult:
    """A trial whose windows took these times per step, eight steps and 64 units each."""
    chosen = rounds if rounds is not None else range(len(step_s))
    windows = [
        sample_window(number, num_steps=8, num_units=64, duration_ns=round(8e9 * s))
        for number, s in zip(chosen, step_s, strict=True)
    ]
    return sample_result(windows=tuple(windows), **{"epoch_restart_ns": None, **changes})


class TestMeans:
    @given(values=values)
    def test_a_mean_lies_between_its_values(self, values: list[float]) -> None:
        for estimate in (plain_mean(values), trimmed_mean(values)):
            assert min(values) - 1e-6 <= estimate.mean <= max(values) + 1e-6
            assert estimate.standard_error >= 0
            assert estimate.degrees >= 1

    @given(values=values, shift=st.floats(-1e3, 1e3))
    def test_a_shift_moves_the_mean_and_not_its_error(self, values: list[float], shift: float) -> None:
        before, after = trimmed_mean(values), trimmed_mean([v + shift for v in values])
        assert after.mean == pytest.approx(before.mean + shift, abs=1e-6)
        if len(values) > 1:
            assert after.standard_error == pytest.approx(before.standard_error, rel=1e-6, abs=1e-6)

    @given(values=values, random=st.randoms(use_true_random=False))
    def test_the_order_of_values_does_not_matter(self, values: list[float], random) -> None:
        shuffled = list(values)
        random.shuffle(shuffled)
        assert trimmed_mean(shuffled).mean == pytest.approx(trimmed_mean(values).mean, abs=1e-6)

    @given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
    def test_the_error_is_that_of_exact_arithmetic(self, values: list[float]) -> None:
        exact = statistics.stdev(values) / math.sqrt(len(values))
        assert plain_mean(values).standard_error == pytest.approx(exact, rel=1e-9, abs=1e-9)

    def test_one_value_has_no_interval(self) -> None:
        for estimate in (plain_mean([3.0]), trimmed_mean([3.0])):
            assert estimate.mean == 3.0
            assert estimate.half_width() == math.inf

    def test_two_values_have_a_very_wide_one(self) -> None:
        """One degree of freedom: 12.7 standard errors."""
        estimate = trimmed_mean([1.0, 3.0])
        assert (estimate.mean, estimate.standard_error, estimate.degrees) == (2.0, 1.0, 1)
        assert estimate.half_width() == pytest.approx(12.706, abs=1e-3)

    def test_equal_values_are_certain(self) -> None:
        assert trimmed_mean([2.0] * 7).half_width() == 0

    def test_fewer_than_five_values_are_not_trimmed(self) -> None:
        assert trimmed_mean([1.0, 2.0, 3.0, 100.0]) == plain_mean([1.0, 2.0, 3.0, 100.0])

    def test_interference_in_a_fifth_of_the_windows_moves_nothing(self) -> None:
        calm = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0]
        assert trimmed_mean([*calm[:8], 50.0, 80.0]).mean == pytest.approx(1.0, abs=0.01)

    def test_yuen_s_formula(self) -> None:
        """Worked by hand: of 1..5 two go; the squares of the winsorised 2 2 3 4 4 sum to 4, over 3 kept times 2."""
        estimate = trimmed_mean([5.0, 1.0, 3.0, 2.0, 4.0])
        assert estimate.mean == 3.0
        assert estimate.degrees == 2
        assert estimate.standard_error == pytest.approx(math.sqrt(4 / 6))

    def test_quantiles_of_student(self) -> None:
        """Tabulated values."""
        assert student_quantile(0.975, 4) == pytest.approx(2.776, abs=1e-3)
        assert student_quantile(0.95, 10) == pytest.approx(1.812, abs=1e-3)
        assert student_quantile(0.975, 1e9) == pytest.approx(1.960, abs=1e-3)

    @given(low=st.floats(0.5, 0.9), high=st.floats(0.91, 0.999))
    def test_a_surer_interval_is_wider(self, low: float, high: float) -> None:
        estimate = Estimate(mean=0.0, standard_error=1.0, degrees=5)
        assert estimate.half_width(high) > estimate.half_width(low)


class TestRates:
    def test_units_per_second(self) -> None:
        """Eight units per step of half a second."""
        assert units_per_s(result_of([0.5] * 5)) == pytest.approx(16.0)

    def test_windows_that_are_void_do_not_count(self) -> None:
        result = sample_result(
            windows=(
                sample_window(0, num_steps=8, num_units=64, duration_ns=4_000_000_000),
                sample_window(1, num_steps=8, num_units=64, duration_ns=400_000_000_000, void="others"),
            ),
            epoch_restart_ns=None,
        )
        assert units_per_s(result) == pytest.approx(16.0)

    def test_starting_epochs_is_spread_over_their_steps(self) -> None:
        """Five seconds every hundred steps are 50 ms a step."""
        result = result_of([0.45] * 5, epoch_restart_ns=5_000_000_000, steps_per_epoch=100)
        assert restart_s_per_step(result) == pytest.approx(0.05)
        assert units_per_s(result) == pytest.approx(16.0)

    @pytest.mark.parametrize(("restart", "steps"), [(None, 100), (0, 100), (5, None), (5, 0)])
    def test_without_an_epoch_there_is_no_such_cost(self, restart: int | None, steps: int | None) -> None:
        assert restart_s_per_step(result_of([0.5], epoch_restart_ns=restart, steps_per_epoch=steps)) == 0

    def test_longer_windows_of_the_same_rate_change_nothing(self) -> None:
        short = sample_window(0, num_steps=8, num_units=64, duration_ns=4_000_000_000)
        long = sample_window(0, num_steps=80, num_units=640, duration_ns=40_000_000_000)
        first, second = (log_rate(sample_result(windows=(w,), epoch_restart_ns=None)).mean for w in (short, long))
        assert first == pytest.approx(second)


class TestRatios:
    def test_are_paired_by_round(self) -> None:
        """Rounds 2 and 5 are common; what each trial did in others says nothing about the ratio."""
        candidate = result_of([0.5, 9.0, 1.0], rounds=[2, 3, 5])
        reference = result_of([7.0, 1.0, 2.0], rounds=[1, 2, 5])
        assert math.exp(log_ratio(candidate, reference).mean) == pytest.approx(2.0)
        assert log_ratio(candidate, reference).standard_error == pytest.approx(0)

    def test_without_common_rounds_there_is_none(self) -> None:
        assert log_ratio(result_of([1.0], rounds=[1]), result_of([1.0], rounds=[2])) is None

    def test_one_round_gives_a_ratio_without_an_interval(self) -> None:
        ratio = log_ratio(result_of([0.5]), result_of([1.0]))
        assert ratio.mean == pytest.approx(math.log(2))
        assert ratio.half_width() == math.inf

    @given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=2, max_size=12))
    def test_the_inverse_comparison_is_the_inverse_ratio(self, pairs: list[tuple[float, float]]) -> None:
        first, second = result_of([a for a, _ in pairs]), result_of([b for _, b in pairs])
        assert log_ratio(first, second).mean == pytest.approx(-log_ratio(second, first).mean, abs=1e-6)

    def test_what_both_saw_cancels(self) -> None:
        """The machine becomes three times slower over the rounds: the paired ratio does not notice."""
        drift = np.linspace(1.0, 3.0, 12)
        ratio = log_ratio(result_of(list(0.8 * drift)), result_of(list(drift)))
        assert math.exp(ratio.mean) == pytest.approx(1.25)
        assert ratio.half_width() < 1e-6
        assert log_rate(result_of(list(drift))).half_width() > 0.1


class TestTruth:
    """Simulated trials: 10 % common drift, 3 % noise of each window, a true gain of 8 %."""

    TRUE = math.log(1.08)

    def simulated(self, num_rounds: int, spikes: float = 0.0) -> list[Estimate]:
        generator = np.random.default_rng(20_261_121)
        found = []
        for _ in range(600):
            common = 0.02 * np.exp(np.cumsum(generator.normal(0, 0.1 / math.sqrt(num_rounds), num_rounds)))
            noise = generator.normal(0, 0.03, (2, num_rounds))
            noise += generator.exponential(0.5, (2, num_rounds)) * (generator.random((2, num_rounds)) < spikes)
            times = common * np.exp(noise)
            times[0] /= 1.08
            found.append(log_ratio(result_of(times[0].tolist()), result_of(times[1].tolist())))
        return found

    @pytest.mark.parametrize("num_rounds", [2, 4, 5, 8, 9, 20])
    def test_intervals_cover_what_they_say(self, num_rounds: int) -> None:
        """600 simulations: the share of a true 95 % has a standard error of 0.9 %; three and a half of them
        are allowed either way (trimming a few normal values costs one point at five rounds).
        """
        found = self.simulated(num_rounds)
        covered = np.mean([abs(e.mean - self.TRUE) <= e.half_width() for e in found])
        assert 0.918 <= covered <= 0.982

    @pytest.mark.parametrize("num_rounds", [2, 8, 20])
    def test_means_are_unbiased(self, num_rounds: int) -> None:
        found = self.simulated(num_rounds)
        error = np.std([e.mean for e in found]) / math.sqrt(len(found))
        assert abs(np.mean([e.mean for e in found]) - self.TRUE) < 3.5 * error

    def test_rare_interference_widens_little(self) -> None:
        """One window in twenty made half as long again or more; the plain mean would be four times as uncertain."""
        spoiled = [e.half_width() for e in self.simulated(20, spikes=0.05)]
        calm = [e.half_width() for e in self.simulated(20)]
        assert np.median(spoiled) < 1.5 * np.median(calm)
