"""The confirmation: intervals that hold, and as many blocks as it takes."""

import math

import numpy as np
import pytest
from builders import sample_result
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.special import ndtr
from search_builders import SMALL, candidate, run_one

from steptune.tuner.costs.categories import Category
from steptune.tuner.estimates import log_rate, student_quantile
from steptune.tuner.records import Gain, Interval, Purpose, TrialResult
from steptune.tuner.search.confirmation import (
    MAX_BLOCKS,
    Finalist,
    Spread,
    all_starts,
    early_end,
    gain_of,
    judge,
    num_blocks,
    plan_blocks,
    spread_of,
)
from steptune.tuner.search.effects import Difference
from steptune.tuner.search.recommend import choose
from steptune.tuner.search.spending import looks, simultaneous_level
from steptune.tuner.trials.fake import FakeRunner, Surface, known_window

BASE, FAST, SLOW = candidate(), candidate(loader=2), candidate(products=1)
KNOWN = Spread(variance=0.0001, degrees=20)
THIRTY = Surface(
    name="thirty",
    base_ms={Category.DATA_WAIT: 130.0},
    factors={"loader": (Category.DATA_WAIT, (1.0, 1 / 1.3))},
)
NUM_SIMULATIONS = 3000
MARGIN = 0.012
"""Three standard errors of a share of 0.95 over the simulations."""


def simulated(seed, true_gains, *, num_blocks=5, noise_sd=0.03):
    """Log ratios of each finalist by block; all share the noise of the block's baseline."""
    generator = np.random.default_rng(seed)
    starts = generator.normal(0, noise_sd, (num_blocks, 1 + len(true_gains)))
    return [list(starts[:, 1 + n] - starts[:, 0] + math.log(gain)) for n, gain in enumerate(true_gains)]


class TestIntervals:
    @pytest.mark.parametrize("gains", [(1.2,), (1.2, 1.0), (1.2, 1.1, 0.9)], ids=len)
    def test_hold_for_all_finalists_at_once_in_95_of_100_studies(self, gains):
        """So the best of them may be chosen; without a spread of both sides it is a little more than 95."""
        held = 0
        for seed in range(NUM_SIMULATIONS):
            judged = [gain_of(ratios, len(gains)) for ratios in simulated(seed, gains)]
            held += all(g.interval.low <= gain <= g.interval.high for g, gain in zip(judged, gains, strict=True))
        assert 0.95 - MARGIN <= held / NUM_SIMULATIONS <= 0.98

    def test_a_repeat_of_the_confirmation_falls_into_the_prediction_in_95_of_100(self):
        inside = 0
        for seed in range(NUM_SIMULATIONS):
            first = gain_of(simulated(seed, (1.1,))[0], 1)
            again = gain_of(simulated(NUM_SIMULATIONS + seed, (1.1,))[0], 1)
            inside += first.prediction.low <= again.ratio <= first.prediction.high
        assert inside / NUM_SIMULATIONS == pytest.approx(0.95, abs=MARGIN)

    def test_call_nothing_faster_that_is_not_in_more_than_three_of_100(self):
        """The interval is two-sided: luck in the one direction has half of the five."""
        fooled = sum(
            any(gain_of(ratios, 2).interval.low > 1 for ratios in simulated(seed, (1.0, 1.0)))
            for seed in range(NUM_SIMULATIONS)
        )
        assert fooled / NUM_SIMULATIONS <= 0.025 + MARGIN

    def test_are_wider_for_more_finalists(self):
        ratios = simulated(0, (1.1,))[0]
        one, three = gain_of(ratios, 1), gain_of(ratios, 3)
        assert three.interval.low < one.interval.low < one.ratio == three.ratio < one.interval.high

    def test_a_machine_that_drifts_widens_the_prediction_alone(self):
        """Blocks of a minute cannot show what an hour does to the ratio; the baseline's scatter hints at it."""
        ratios = simulated(0, (1.1,))[0]
        steady, drifting = gain_of(ratios, 1, [7.0] * 9), gain_of(ratios, 1, [7.0, 7.2, 6.9] * 3)
        assert steady == gain_of(ratios, 1)
        assert drifting.interval == steady.interval
        assert drifting.prediction.low < steady.prediction.low
        assert drifting.prediction.high > steady.prediction.high

    def test_the_prediction_takes_in_what_the_search_saw_of_the_baseline(self):
        blocks = TestJudging().blocks()
        slow = run_one(FakeRunner(SMALL), BASE, Purpose.BASELINE)
        slow = replace(slow, windows=tuple(replace(w, duration_ns=2 * w.duration_ns) for w in slow.windows))
        before, after = judge(BASE, [FAST], blocks)[0], judge(BASE, [FAST], blocks, {BASE.key: [slow]})[0]
        assert after.gain.prediction.low < before.gain.prediction.low

    def test_need_two_blocks(self):
        assert gain_of([0.1], 1) is None


class TestNumberOfBlocks:
    @given(
        at_least=st.integers(2, 20),
        noise_sd=st.floats(0.001, 0.2),
        gain=st.floats(-0.5, 3),
        finalists=st.integers(1, 4),
    )
    def test_is_never_less_than_asked_nor_without_limit(self, at_least, noise_sd, gain, finalists):
        count = num_blocks(at_least=at_least, noise_sd=noise_sd, expected_gain=gain, num_finalists=finalists)
        assert at_least <= count <= max(at_least, MAX_BLOCKS)

    def test_grows_with_noise_and_shrinks_with_the_gain(self):
        counts = [num_blocks(at_least=5, noise_sd=sd, expected_gain=0.05, num_finalists=2) for sd in (0.01, 0.02, 0.03)]
        assert counts == sorted(counts)
        assert counts[0] == 5 < counts[-1]
        assert num_blocks(at_least=5, noise_sd=0.03, expected_gain=0.5, num_finalists=2) == 5

    def test_shows_the_expected_gain_in_eight_of_ten_studies(self):
        gain, noise_sd = 0.06, 0.03
        count = num_blocks(at_least=3, noise_sd=noise_sd, expected_gain=gain, num_finalists=1)
        assert 3 < count < MAX_BLOCKS
        shown = [
            gain_of(simulated(seed, (1 + gain,), num_blocks=count, noise_sd=noise_sd)[0], 1).interval.low > 1
            for seed in range(NUM_SIMULATIONS)
        ]
        assert 0.75 <= np.mean(shown) <= 0.90


class TestBlocks:
    def test_start_every_candidate_once_in_an_order_that_varies(self):
        blocks = plan_blocks(BASE, [FAST, SLOW], 12, seed=0)
        assert all(sorted(c.key for c in b.order) == sorted(c.key for c in (BASE, FAST, SLOW)) for b in blocks)
        assert len({tuple(c.key for c in block.order) for block in blocks}) > 1
        assert [block.number for block in blocks] == list(range(12))

    def test_come_in_pairs_of_reverse_order(self):
        """A machine that slows down steadily favours nobody."""
        blocks = plan_blocks(BASE, [FAST, SLOW], 12, seed=0)
        assert all(second.order == first.order[::-1] for first, second in zip(blocks[::2], blocks[1::2], strict=True))

    @given(seed=st.integers(0, 1000), count=st.integers(1, 12), more=st.integers(0, 5))
    def test_of_a_longer_confirmation_begin_like_those_of_a_shorter(self, seed, count, more):
        longer = plan_blocks(BASE, [FAST, SLOW], count + more, seed)
        assert longer[:count] == plan_blocks(BASE, [FAST, SLOW], count, seed)


class TestJudging:
    def blocks(self, count=5, group="group"):
        runner = FakeRunner(SMALL, noise_sd=0.01, seed=4)
        return [
            {c.key: replace(run_one(runner, c, Purpose.CONFIRM), group=group) for c in (BASE, FAST, SLOW)}
            for _ in range(count)
        ]

    def test_finds_the_gain_of_each_and_puts_the_best_first(self):
        judged = judge(BASE, [SLOW, FAST], self.blocks())
        assert [finalist.candidate for finalist in judged] == [FAST, SLOW]
        assert [finalist.is_faster for finalist in judged] == [True, False]
        for finalist in judged:
            truth = SMALL.total_ms(BASE) / SMALL.total_ms(finalist.candidate)
            assert finalist.gain.interval.low < truth < finalist.gain.interval.high

    def test_a_block_without_one_of_them_does_not_count_for_that_one(self):
        blocks = self.blocks()
        del blocks[1][FAST.key]
        del blocks[2][BASE.key]
        by_key = {f.candidate.key: f for f in judge(BASE, [FAST, SLOW], blocks)}
        assert len(by_key[FAST.key].log_ratios) == 3
        assert len(by_key[SLOW.key].log_ratios) == 4

    def test_with_fewer_than_two_blocks_there_is_no_gain(self):
        assert [f.gain for f in judge(BASE, [FAST, SLOW], self.blocks(1))] == [None, None]

    def test_only_trials_that_took_turns_are_paired_by_window(self):
        """A window that is slow for both by interference cancels in a ratio of windows, not of means."""
        block = self.blocks(1)[0]
        slowed = {
            key: replace(
                result, windows=tuple(replace(w, duration_ns=w.duration_ns * (1 + w.round)) for w in result.windows)
            )
            for key, result in block.items()
        }
        slowed[FAST.key] = replace(slowed[FAST.key], windows=slowed[FAST.key].windows[:2])
        paired = judge(BASE, [FAST], [slowed])[0].log_ratios[0]
        apart = {key: replace(result, group=key) for key, result in slowed.items()}
        unpaired = judge(BASE, [FAST], [apart])[0].log_ratios[0]
        plain = judge(BASE, [FAST], [block])[0].log_ratios[0]
        assert paired == pytest.approx(plain, abs=1e-6)
        assert abs(unpaired - plain) > 0.1


def finalist(candidate, *log_ratios):
    return Finalist(candidate=candidate, log_ratios=log_ratios, gain=gain_of(log_ratios, 2))


class TestChoice:
    SIMPLE, COMPLEX = candidate(loader=2), candidate(loader=2, products=2)

    def test_is_none_where_nothing_is_proven_faster(self):
        assert choose([finalist(FAST, -0.1, 0.1, 0.0, 0.05, -0.05)]) is None
        assert choose([]) is None

    def test_is_the_simpler_one_unless_that_is_slower_by_more_than_a_hundredth(self):
        best = finalist(self.COMPLEX, 0.30, 0.34, 0.31, 0.33, 0.32)
        as_good = finalist(self.SIMPLE, 0.31, 0.32, 0.32, 0.31, 0.32)
        slower = finalist(self.SIMPLE, 0.28, 0.32, 0.29, 0.31, 0.30)
        assert choose([best, as_good]).candidate == self.SIMPLE
        assert choose([best, slower]).candidate == self.COMPLEX

    def test_weighs_what_the_search_saw_beside_the_confirmation(self):
        """Two blocks are ahead by luck where a dozen trials of the search said otherwise."""
        lucky = Finalist(
            candidate=FAST, log_ratios=(0.3, 0.3), gain=gain_of((0.29, 0.31), 1, spread=KNOWN), standard_error=0.05
        )
        other = Finalist(
            candidate=SLOW, log_ratios=(0.25, 0.25), gain=gain_of((0.24, 0.26), 1, spread=KNOWN), standard_error=0.05
        )
        searched = {FAST.key: Difference(mean=0.1, sd=0.01), SLOW.key: Difference(mean=0.25, sd=0.01)}
        assert choose([lucky, other]).candidate == FAST
        assert choose([lucky, other], lambda candidate: searched[candidate.key]).candidate == SLOW


def side(variance, degrees, purposes=()):
    """Starts, of which the first ones have these purposes: with such a variance about their mean."""
    deviations = np.array([(-1.0) ** n for n in range(degrees + 1)])
    deviations -= deviations.mean()
    rates = deviations * math.sqrt(variance * degrees / (deviations**2).sum()) if degrees else deviations
    purposes = [*purposes, *[Purpose.CONFIRM] * (1 + degrees - len(purposes))]
    return [
        TrialResult(
            trial_id=str(n),
            candidate=BASE,
            purpose=purpose,
            group=str(n),
            windows=(known_window(0, 1e9 * math.exp(-rate)),),
        )
        for n, (rate, purpose) in enumerate(zip(rates, purposes, strict=True))
    ]


class TestSpread:
    """How much a block's log ratio scatters."""

    def test_is_that_of_all_starts_where_the_blocks_agree_with_them(self):
        spread = spread_of((0.30, 0.33), side(0.0004, 3), side(0.0005, 5))
        assert (spread.degrees, spread.common) == (8, 0.5)
        assert spread.variance == pytest.approx(2 * (3 * 0.0004 + 5 * 0.0005) / 8)

    def test_has_a_variance_for_each_side_where_these_differ(self):
        spread = spread_of((0.30, 0.35), side(0.0100, 3), side(0.0001, 5))
        assert spread.variance == pytest.approx(0.0101)
        assert 3 <= spread.degrees < 3.2
        assert spread.common == pytest.approx(0.0001 / 0.0101)

    def test_leaves_out_the_start_that_selected_a_winner_that_scatters_like_the_baseline(self):
        explored = side(0.0004, 3, [Purpose.EXPLORE, Purpose.REPLICATE])
        spread = spread_of((0.30, 0.33), explored, side(0.0005, 5, [Purpose.BASELINE]))
        assert (spread.degrees, spread.common) == (7, 0.5)
        left = np.var([log_rate(result).mean for result in explored[1:]], ddof=1)
        assert spread.variance == pytest.approx(2 * (2 * left + 5 * 0.0005) / 7)

    def test_keeps_the_start_that_selected_a_winner_of_two_starts(self):
        assert spread_of((0.30, 0.33), side(0.0004, 1, [Purpose.EXPLORE]), side(0.0005, 5)).degrees == 6

    @pytest.mark.parametrize("ratios", [(0.1, 0.9), (0.3001, 0.3002, 0.3001, 0.3, 0.3002)], ids=["more", "less"])
    def test_is_that_of_the_blocks_where_they_see_something_else(self, ratios):
        """A load within a block, or one that both sides share."""
        spread = spread_of(ratios, side(0.0004, 6), side(0.0004, 6))
        assert (spread.variance, spread.degrees) == (pytest.approx(np.var(ratios, ddof=1)), len(ratios) - 1)

    def test_two_blocks_that_agree_by_chance_prove_no_smaller_scatter(self):
        """In a modelled study two ratios agreed to two millionths, and the interval missed the truth by 0.5 %."""
        spread = spread_of((0.300000, 0.300002), side(0.00003, 2), side(0.00002, 2))
        assert (spread.variance, spread.degrees) == (pytest.approx(0.00005), 4)

    def test_is_that_of_the_blocks_where_a_side_started_once(self):
        assert spread_of((0.30, 0.33), side(0.0, 0), side(0.0004, 5)).degrees == 1

    def test_starts_of_another_place_say_how_much_starts_differ_but_not_by_how_far_places_do(self):
        blocks = TestJudging().blocks(2)
        far = [
            replace(run_one(FakeRunner(SMALL, noise_sd=0.01, seed=seed), BASE, Purpose.BASELINE), place="far")
            for seed in range(2)
        ]
        far = [replace(r, windows=tuple(replace(w, duration_ns=9 * w.duration_ns) for w in r.windows)) for r in far]
        found = judge(BASE, [FAST], blocks, {BASE.key: far})[0]
        assert found.gain.interval.high / found.gain.interval.low < 1.3


class TestSeveralFinalists:
    @pytest.mark.parametrize(
        ("count", "degrees", "bound"), [(2, 5, 3.03), (2, 10, 2.57), (3, 10, 2.76), (2, 1e6, 2.21)], ids=str
    )
    def test_the_level_of_each_is_that_of_published_tables(self, count, degrees, bound):
        """Bounds of Dunnett's two-sided comparison with a control at 5 %."""
        level = simultaneous_level(0.05, count, degrees, 0.5)
        assert student_quantile(1 - level / 2, degrees) == pytest.approx(bound, abs=0.006)

    def test_one_comparison_has_the_whole_error_and_unknown_correlation_that_of_bonferroni(self):
        assert simultaneous_level(0.05, 1, 5, 0.5) == 0.05
        assert simultaneous_level(0.05, 2, 5, 0.0) == 0.025

    @pytest.mark.parametrize("correlation", [0.1, 0.5, 0.9999])
    @pytest.mark.parametrize("alpha", [0.05, 1e-4])
    def test_few_degrees_and_arms_that_vary_together_have_a_level_too(self, alpha: float, correlation: float) -> None:
        """The integral over the variance is rough there: between Bonferroni's level and that of one interval."""
        assert alpha / 2 <= simultaneous_level(alpha, 2, 1, correlation) <= alpha

    @given(count=st.integers(2, 4), degrees=st.floats(1, 100), less=st.floats(0.01, 0.5), more=st.floats(0, 0.49))
    @settings(max_examples=30, deadline=None)
    def test_differences_that_err_together_are_widened_less(self, count, degrees, less, more):
        levels = [simultaneous_level(0.05, count, degrees, c) for c in (less, less + more)]
        assert 0.05 / count - 1e-4 <= levels[0] <= levels[1] + 1e-4 <= 0.0502


class TestTwoBlocks:
    """The fewest blocks, with the starts of a search."""

    def test_confirm_a_gain_of_three_tenths_under_two_hundredths_of_noise(self):
        """Two blocks alone, by their own scatter, fail to in one of three studies."""
        found = []
        for seed in range(200):
            runner = FakeRunner(THIRTY, noise_sd=0.02, seed=seed)
            blocks = [{c.key: run_one(runner, c, Purpose.CONFIRM) for c in (BASE, FAST)} for _ in range(2)]
            earlier = {c.key: [run_one(runner, c) for _ in range(n)] for c, n in ((BASE, 3), (FAST, 1))}
            found.append(judge(BASE, [FAST], blocks, earlier)[0])
        assert np.mean([f.is_faster for f in found]) >= 0.95
        widths = [f.gain.interval.high / f.gain.interval.low for f in found]
        assert np.median(widths) < 1.2


class TestEarlyEnd:
    @pytest.mark.parametrize("planned", [2, 3, 5, 12])
    def test_all_looks_together_spend_no_more_than_the_error_of_one(self, planned):
        """Sums of normal variables without a gain, of which every one is looked at."""
        sums = np.cumsum(np.random.default_rng(planned).normal(size=(100_000, planned)), axis=1)
        levels, crossed = looks(2, planned, 0.05, planned), np.zeros(100_000, bool)
        for count in range(2, planned + 1):
            level = levels[count].last if count == planned else levels[count].early
            crossed |= 2 * ndtr(-np.abs(sums[:, count - 1]) / math.sqrt(count)) < level
        assert crossed.mean() == pytest.approx(0.05, abs=0.003)

    def test_the_last_look_pays_for_the_earlier_ones(self):
        """The interval after all planned blocks is wider than that of as many at which nobody looked before."""
        blocks = [
            {c.key: run_one(FakeRunner(THIRTY, noise_sd=0.02, seed=n), c, Purpose.CONFIRM) for c in (BASE, FAST)}
            for n in range(5)
        ]
        looked, at_once = (judge(BASE, [FAST], blocks, planned=planned)[0].gain.interval for planned in (5, None))
        assert looked.low < at_once.low < at_once.high < looked.high

    @given(planned=st.integers(2, 12), alpha=st.floats(0.001, 0.1))
    @settings(max_examples=20, deadline=None)
    def test_asks_for_more_than_the_last_look_does(self, planned, alpha):
        for look in looks(2, planned, alpha, planned).values():
            assert look.early <= look.last + 1e-9
            assert look.last <= alpha + 1e-9

    def test_comes_with_a_proven_gain(self):
        blocks = TestJudging().blocks(2)
        judged = judge(BASE, [FAST], blocks, planned=12)
        assert judged[0].is_proven
        assert early_end(judged) == "the gain was proven"

    def test_does_not_come_while_the_interval_is_too_wide_for_a_verdict(self):
        gain = Gain(
            ratio=6.0,
            interval=Interval(low=1.5, high=24.0, level=0.95),
            prediction=Interval(low=1.0, high=36.0, level=0.95),
            num_blocks=2,
            num_finalists=1,
        )
        for proven in (True, False):
            wide = Finalist(candidate=FAST, log_ratios=(1.0, 2.5), gain=gain, is_proven=proven, is_hopeless=not proven)
            assert early_end([wide]) == ""

    def test_comes_where_more_blocks_would_hardly_prove_a_gain(self):
        blocks = TestJudging().blocks(3)
        judged = judge(BASE, [SLOW], blocks, planned=12)
        assert judged[0].is_hopeless
        assert not judged[0].is_faster
        assert "unlikely" in early_end(judged)

    def test_does_not_come_while_a_finalist_may_still_be_proven(self):
        lost = Finalist(candidate=SLOW, log_ratios=(-0.1, -0.1), gain=None, is_hopeless=True)
        open_one = Finalist(candidate=FAST, log_ratios=(0.02, 0.01), gain=None)
        assert early_end([open_one, lost]) == ""
        assert early_end([]) == ""


def test_runs_that_began_otherwise_than_those_of_the_blocks_say_nothing_of_their_scatter():
    """Forks of one process differ less than new processes do."""
    forked, started = sample_result(interpreter="forked"), sample_result(interpreter="started")
    assert all_starts({"it": [forked, started]}, [{"it": started}]) == {"it": [started, started]}
    assert all_starts({"it": [forked], "other": [started]}, []) == {"it": [forked], "other": [started]}
