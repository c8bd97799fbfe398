"""From a finished search to the answer: what it claims, of what it consists, what it cost."""

import math

import pytest
from builders import sample_study
from msgspec.structs import replace
from search_builders import SMALL, Machine, StudyRun, candidate, searched

from steptune.tuner.costs.categories import Category
from steptune.tuner.objectives import PLAIN
from steptune.tuner.records import FailureKind, Startup, StudySettings, Verdict
from steptune.tuner.search.confirmation import Finalist, gain_of
from steptune.tuner.search.recommend import recommend
from steptune.tuner.trials.fake import Surface, fake_environment, fake_workload

BEST = candidate(loader=2, products=2)
BASE_RATE = 320.0
NOTHING_TO_GAIN = Surface(
    name="nothing_to_gain",
    base_ms={Category.MATMUL: 99.9, Category.OPTIMIZER: 0.1},
    factors={"update": (Category.OPTIMIZER, (1.0,))},
)


def finalist(what, *log_ratios):
    return Finalist(candidate=what, log_ratios=log_ratios, gain=gain_of(log_ratios, 1))


@pytest.fixture
def designer():
    return searched(SMALL, seed=0, trials=12, noise_sd=0.005)


def answer(designer, finalists=(), confirming=(), contributions=None, **changes):
    study = sample_study(
        facts=fake_workload(), environment=fake_environment(), settings=StudySettings(num_ranks=2), **changes
    )
    study = replace(study, facts=replace(study.facts, units_per_batch=32.0))
    return recommend(
        study,
        designer,
        finalists,
        log_rates=lambda candidate, counted: [math.log(BASE_RATE)],
        objective=PLAIN,
        tuning_s=100.0,
        num_trials=20,
        version="1",
        confirming=confirming,
        contributions=contributions,
    )


class TestVerdict:
    def test_a_proven_finalist_is_faster_by_its_confirmed_gain(self, designer):
        found = answer(designer, [finalist(BEST, 0.69, 0.70, 0.71)])
        assert (found.verdict, found.candidate) == (Verdict.FASTER, BEST)
        assert found.gain.ratio == pytest.approx(math.exp(0.70))
        assert found.units_per_s == pytest.approx(BASE_RATE * found.gain.ratio)

    def test_an_unproven_finalist_is_no_gain_and_the_baseline_is_the_answer(self, designer):
        found = answer(designer, [finalist(BEST, -0.03, 0.03, 0.01)])
        assert found.verdict is Verdict.NO_SIGNIFICANT_GAIN
        assert found.candidate.is_baseline
        assert found.gain is None
        assert found.unproven_gain.interval.low < 1 < found.unproven_gain.interval.high
        assert found.units_per_s == found.baseline_units_per_s == pytest.approx(BASE_RATE)

    @pytest.mark.parametrize("log_ratios", [(-0.9, 0.9, 0.1), (0.9, 1.5, 2.9)])
    def test_a_wide_interval_is_inconclusive_whether_or_not_it_excludes_one(self, designer, log_ratios):
        """Settings that are proven faster stay recommended, however wide the interval is."""
        found = answer(designer, [finalist(BEST, *log_ratios)])
        gain = found.gain or found.unproven_gain
        assert gain.interval.high > 4 * gain.interval.low
        assert found.verdict is Verdict.INCONCLUSIVE
        assert found.candidate.is_baseline == (gain.interval.low <= 1)

    def test_the_finalist_of_an_unproven_gain_is_named(self, designer):
        found = answer(designer, [finalist(BEST, -0.03, 0.03, 0.01)])
        assert found.unproven_candidate == BEST
        assert found.alternatives[0].confirmed == found.unproven_gain

    def test_the_load_of_the_confirmation_counts(self, designer):
        [start, *_] = designer.baseline_results()
        busy = replace(start, windows=tuple(replace(w, foreign_cpu_share=0.4) for w in start.windows))
        assert answer(designer).foreign_cpu_share < 0.1
        assert answer(designer, confirming=[busy]).foreign_cpu_share == pytest.approx(0.4)
        marked = replace(busy, windows=tuple(replace(w, marked="others used the cores") for w in busy.windows))
        unsure = [finalist(BEST, -0.3, 0.3, 0.01)]
        assert answer(designer, unsure, confirming=[marked]).verdict is Verdict.INCONCLUSIVE

    def test_without_a_confirmation_the_best_is_named_as_unconfirmed(self, designer):
        found = answer(designer, [])
        assert (found.verdict, found.candidate, found.gain) == (Verdict.UNCONFIRMED, BEST, None)
        assert found.units_per_s / BASE_RATE == pytest.approx(
            SMALL.total_ms(candidate()) / SMALL.total_ms(BEST), rel=0.03
        )

    def test_a_study_that_tried_nothing_claims_nothing(self):
        """The budget was spent on the baseline: no word of a search that found nothing, but what one would take."""
        study = StudyRun(Machine(SMALL, start_s=100.0), budget_s=170.0)
        found = study.run()
        assert {candidate.is_baseline for candidate in study.machine.candidates_run} == {True}
        assert (found.verdict, found.gain, found.unproven_gain) == (Verdict.NOT_SEARCHED, None, None)
        assert "may still save" in found.no_time_for[0]
        assert found.needed_budget_s > 2 * 170.0

    def test_the_budget_that_is_named_suffices(self):
        needed_s = StudyRun(Machine(SMALL, start_s=100.0), budget_s=170.0).run().needed_budget_s
        again = StudyRun(Machine(SMALL, start_s=100.0), budget_s=needed_s).run()
        assert (again.verdict, again.needed_budget_s) == (Verdict.FASTER, None)

    def test_an_interrupt_after_the_baseline_is_no_verdict_on_the_rest(self):
        found = StudyRun(Machine(SMALL, interrupt_at=1)).run()
        assert (found.verdict, found.certificate.ended) == (Verdict.NOT_SEARCHED, "interrupted")
        assert {decision.reason for decision in found.certificate.not_tried} == {"the study was interrupted"}
        assert "may still save" in found.no_time_for[0]
        assert found.needed_budget_s is None

    def test_candidates_that_ran_out_of_the_time_that_was_left_were_not_judged(self):
        late = dict.fromkeys([("loader", 1), ("loader", 2), ("products", 1)], FailureKind.TIMEOUT)
        late |= {("products", 2): FailureKind.TIMEOUT, ("update", 1): FailureKind.TIMEOUT}
        study = StudyRun(Machine(SMALL, broken=late, start_s=20.0), budget_s=120.0)
        found = study.run()
        assert len({candidate.key for candidate in study.machine.candidates_run}) > 1
        assert found.verdict is Verdict.NOT_SEARCHED

    def test_where_no_bound_is_above_the_noise_the_search_is_done(self):
        """Nothing was tried because nothing could gain enough: that is an answer."""
        study = StudyRun(Machine(NOTHING_TO_GAIN))
        assert study.run().verdict is Verdict.NO_SIGNIFICANT_GAIN


class TestContent:
    @pytest.fixture
    def found(self, designer):
        return answer(designer, [finalist(BEST, 0.69, 0.70, 0.71)])

    def test_parts_have_what_was_measured_of_them_the_largest_first(self, designer):
        """The search's own trials say nothing of it."""
        measured = {"products": gain_of((0.30, 0.31, 0.29), 2), "loader": gain_of((0.55, 0.56, 0.57), 2)}
        found = answer(designer, [finalist(BEST, 0.69, 0.70, 0.71)], contributions=measured)
        assert [part.strategy for part in found.parts] == ["loader", "products"]
        for part in found.parts:
            expected = measured[part.strategy]
            assert (part.gain, part.interval, part.num_blocks) == (expected.ratio, expected.interval, 3)
            assert part.reason
        unmeasured = answer(designer, [finalist(BEST, 0.69, 0.70, 0.71)])
        assert [part.gain for part in unmeasured.parts] == [None, None]

    def test_the_step_is_shown_before_and_after(self, found):
        assert sum(found.shares_before.values()) == pytest.approx(1.0)
        assert sum(found.shares_after.values()) == pytest.approx(1.0)
        assert found.shares_after["data_wait"] < 0.15 < found.shares_before["data_wait"]
        assert found.bottleneck_before != "unknown"

    def test_choices_are_complete_for_whoever_applies_them(self, found):
        assert found.choices == {"loader": {"level": 2}, "products": {"level": 2}, "update": {"level": 0}}
        assert found.num_ranks == 2

    def test_alternatives_are_the_next_best_with_what_they_cost(self, found):
        gains = [alternative.gain for alternative in found.alternatives]
        assert gains == sorted(gains, reverse=True)
        assert BEST not in [alternative.candidate for alternative in found.alternatives]
        assert all(a.peak_memory_bytes > 0 and a.guard == "same for 4 steps" for a in found.alternatives)

    def test_the_certificate_bounds_what_is_left(self, found, designer):
        untried = designer.knowledge.untried(designer.incumbent)
        assert found.certificate.remaining_bound == max((bound for _, bound in untried), default=0.0)
        assert found.certificate.status == "estimated"

    def test_tuning_is_paid_back_by_what_is_saved(self, found):
        """A step of 32 samples took 0.1 s and takes half of it: 0.05 s a step pay for 100 s of tuning."""
        assert found.cost.payback_tuning_steps == pytest.approx(100 / (0.1 * (1 - math.exp(-0.70))))
        assert found.cost.payback_steps is None

    def test_compilation_is_paid_back_apart(self, designer):
        results = designer.knowledge.results[BEST.key]
        compiled = Startup(
            build_ns=0, user_code_ns=0, first_step_ns=0, warm_up_ns=0, warm_up_steps=1, steady=True,
            compile_ns=10_000_000_000, compile_cold=True,
        )  # fmt: skip
        results[0] = replace(results[0], startup=compiled)
        cost = answer(designer, [finalist(BEST, 0.69, 0.70, 0.71)]).cost
        assert cost.compile_s == 10.0
        assert cost.payback_steps == pytest.approx(10 / (0.1 * (1 - math.exp(-0.70))))
