"""Whole studies on machines of which everything is known: every stage, every kind of trouble."""

import pytest
from builders import sample_topology
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from search_builders import RECOMPILING, SMALL, Machine, StudyRun, candidate

from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import BaselineError, BudgetError, ChoiceError, RunnerError, StoreError
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import (
    Environment,
    Failure,
    FailureKind,
    Numerics,
    Phase,
    Purpose,
    StudyState,
    Topology,
    TrialState,
    Verdict,
)
from steptune.tuner.search import preparation
from steptune.tuner.search.contribution_run import ContributionRun
from steptune.tuner.search.designer import LEAST_RESERVE, Designer
from steptune.tuner.search.plain_searches import RandomSearch
from steptune.tuner.search.preparation import LINKS_SHARE, LONGEST_LINKS_S
from steptune.tuner.search.space import Space
from steptune.tuner.speeds import contribution_of
from steptune.tuner.trials.fake import DRIFT, NOISE, PAIR, SEPARABLE, WALL, FakeStrategy, Surface

ROUNDING_S = 1e-6
BEST_OF_SMALL = candidate(loader=2, products=2)
AFTER_SEARCH = (Purpose.CONFIRM, Purpose.CONTRIBUTION)
TOO_LARGE = Surface(
    name="too large",
    base_ms=SMALL.base_ms,
    factors={**SMALL.factors, "recompute": (Category.MATMUL, (1.1, 1.3))},
    memory_gb={"recompute": (-1.0, -5.0), "loader": (0.5, 0.5)},
    base_gb=12.0,
    cap_gb=10.0,
)
"""The baseline does not fit; `recompute: level=2` is the only change of one choice with which it does."""


class TestAnswer:
    def test_recommends_what_is_fastest_and_gives_its_gain_with_an_interval(self):
        study = StudyRun(Machine(SMALL, seed=1))
        answer = study.run()
        true_gain = SMALL.total_ms(candidate()) / SMALL.total_ms(BEST_OF_SMALL)
        assert answer.verdict is Verdict.FASTER
        assert answer.candidate == BEST_OF_SMALL
        assert answer.gain.interval.low < true_gain < answer.gain.interval.high
        assert answer.gain.prediction.low < answer.gain.interval.low
        assert answer.gain.num_blocks == 2, "twice as fast is clear at once"
        assert study.store.recommendation(study.study_id) == answer
        assert study.store.get_study(study.study_id).state is StudyState.COMPLETED

    def test_where_nothing_pays_it_says_so(self):
        answer = StudyRun(Machine(NOISE, noise_sd=0.03)).run()
        assert answer.verdict is Verdict.NO_SIGNIFICANT_GAIN
        assert answer.candidate.is_baseline
        assert answer.units_per_s == answer.baseline_units_per_s
        assert answer.parts == ()

    def test_figures_that_selected_do_not_enter_the_interval(self):
        """The confirmation's trials are new ones, and as many of the baseline as of each finalist."""
        study = StudyRun(Machine(SMALL))
        answer = study.run()
        confirmed = [trial for trial in study.trials if trial.purpose is Purpose.CONFIRM]
        by_candidate = {t.candidate.label: [] for t in confirmed}
        for trial in confirmed:
            by_candidate[trial.candidate.label].append(trial.replicate)
        assert set(by_candidate) >= {"baseline", answer.candidate.label}
        assert all(blocks == list(range(answer.gain.num_blocks)) for blocks in by_candidate.values())
        decided = {trial_id for decision in study.decisions for trial_id in decision.trial_ids}
        assert not decided & {trial.trial_id for trial in confirmed}

    def test_takes_turns_with_the_incumbent_where_both_fit(self):
        """Then only ratios within a group count, and drift of any size is no matter."""
        machine = Machine(DRIFT, paired=True, noise_sd=0.01)
        study = StudyRun(machine, max_trials=25)
        answer = study.run()
        assert DRIFT.total_ms(answer.candidate) <= 1.02 * DRIFT.best_ms()
        first, *others = machine.runs
        assert len(first) == 1, "nothing is known yet of the memory that it takes"
        assert all(len(run) >= 2 for run in others)
        assert {purposes[0] for run in others for purposes in [[p for _, p in run]]} <= {
            Purpose.COMPANION,
            Purpose.CONFIRM,
            Purpose.CONTRIBUTION,
        }

    def test_a_certificate_names_every_choice_that_was_not_tried_with_the_reason(self):
        study = StudyRun(Machine(SEPARABLE), skip=("layout",), max_trials=4)
        certificate = study.run().certificate
        reasons = {(d.moves[0].strategy, d.moves[0].choice["level"]): d.reason for d in certificate.not_tried}
        tried = {(n, c["level"]) for t in study.trials for n, c in t.candidate.choices.items()}
        assert reasons[("layout", 1)] == "left out by --skip"
        assert "the limit on trials was reached" in reasons.values()
        assert reasons.keys() | tried == {(s.name, n) for s in SEPARABLE.strategies for n in range(1, s.levels + 1)}
        assert certificate.ended == "trials spent"
        assert certificate.remaining_bound > 0.05


class TestStory:
    def test_everything_is_in_the_record_in_its_order(self):
        strategies = input_strategies()
        surface = replace_factors(strategies)
        study = StudyRun(Machine(surface, noise_sd=0.004), strategies=strategies, max_trials=45)
        answer = study.run()
        stages = [decision.stage for decision in study.decisions]
        assert list(dict.fromkeys(stages)) in (
            ["baseline", "search", "confirm"],
            ["baseline", "search", "end", "confirm"],
        )
        assert [d.sequence for d in study.decisions] == list(range(1, len(stages) + 1))
        assert surface.total_ms(answer.candidate) <= 1.02 * surface.best_ms()
        assert study.stages[0] == "inspecting the machine"
        assert study.stages[-1] == "done"

    def test_a_past_winner_is_tried_first(self):
        store = MemoryStudyStore()
        StudyRun(Machine(SMALL), store=store).run()
        later = StudyRun(Machine(SMALL, seed=1), store=store)
        later.run()
        past = next(decision for decision in later.decisions if decision.stage == "past")
        assert (past.candidate, past.verdict, past.sequence) == (BEST_OF_SMALL, "accepted", 2)

    def test_every_trial_is_stored_before_the_next_is_asked_for(self):
        study = StudyRun(Machine(SMALL))
        study.run()
        assert all(trial.state is TrialState.COMPLETED and trial.result for trial in study.trials)
        assert [trial.sequence for trial in study.trials] == list(range(1, len(study.trials) + 1))
        kinds = [event.kind for event in study.store.events(study.study_id)]
        num_baselines = sum(run[0][1] is Purpose.BASELINE for run in study.machine.runs)
        trials = ["trials_began", "trials_ended"] * len(study.machine.runs)
        trials.insert(2 * num_baselines, "reference_made")  # once there is a candidate to judge
        assert kinds == ["prepared", "priors", *trials, "recommended"]


class Ending(MemoryStudyStore):
    """Refuses whatever is written to a study that has ended: nobody would see it."""

    def __getattribute__(self, name: str):
        if name in ("add_event", "replace_decisions", "save_recommendation", "complete_trials", "update_study"):
            assert not any(s.state in (StudyState.COMPLETED, StudyState.FAILED) for s in self.list_studies()), name
        return super().__getattribute__(name)


class TestEnd:
    def test_nothing_is_written_after_the_end(self):
        """A kill at any moment leaves a study that is complete, or one that goes on."""
        study = StudyRun(Machine(SMALL), store=Ending())
        study.run()
        events = study.store.events(study.study_id)
        assert events[-1].kind == "recommended"
        assert study.store.get_study(study.study_id).state is StudyState.COMPLETED


class TestConsent:
    @pytest.mark.parametrize(
        ("numerics", "allow", "tried"),
        [
            (Numerics.LOSSY, (), False),
            (Numerics.LOSSY, (Numerics.LOSSY,), True),
            (Numerics.LOSSY, (Numerics.RECIPE,), False),
            (Numerics.RECIPE, (), False),
            (Numerics.RECIPE, (Numerics.RECIPE,), True),
        ],
    )
    def test_choices_that_change_the_training_need_consent(self, numerics, allow, tried):
        strategies = [Dropping(name, s.category, s.levels, numerics) for name, s in named(SMALL).items()]
        study = StudyRun(Machine(SMALL), strategies=strategies, allow=allow)
        answer = study.run()
        assert answer.candidate == (BEST_OF_SMALL if tried else candidate(products=2))
        assert any("loader" in c.choices for c in study.machine.candidates_run) is tried
        reasons = {d.reason for d in answer.certificate.not_tried if d.moves[0].strategy == "loader"}
        assert reasons == (set() if tried else {f"is {numerics}: allow it with --allow {numerics}"})

    @pytest.mark.parametrize("asked", [{"only": ("products",)}, {"skip": ("loader", "update")}])
    def test_only_what_was_asked_for_is_tried(self, asked):
        study = StudyRun(Machine(SMALL), **asked)
        assert study.run().candidate == candidate(products=2)
        assert {name for c in study.machine.candidates_run for name in c.choices} == {"products"}

    @pytest.mark.parametrize("asked", [{"only": ("product",)}, {"skip": ("product",)}])
    def test_an_unknown_strategy_is_refused_by_name(self, asked):
        study = StudyRun(Machine(SMALL), **asked)
        with pytest.raises(ChoiceError, match=r"there is no strategy 'product': did you mean 'products'\?"):
            study.run()
        assert study.machine.runs == []
        assert study.store.get_study(study.study_id).state is StudyState.FAILED


class TestTrouble:
    def test_running_out_of_memory_costs_one_failed_trial_and_the_study_goes_on(self):
        study = StudyRun(Machine(WALL, noise_sd=0.01), max_trials=25)
        answer = study.run()
        failed = [trial for trial in study.trials if trial.state is TrialState.FAILED]
        assert failed
        assert len({trial.candidate.key for trial in failed}) == len(failed)
        assert WALL.total_ms(answer.candidate) <= 1.02 * WALL.best_ms()

    @pytest.mark.parametrize("kind", list(FailureKind))
    def test_a_choice_that_fails_is_not_tried_again_by_itself(self, kind):
        """Whatever it does, it costs a failed trial; the decision says why."""
        study = StudyRun(Machine(SMALL, broken={("products", 2): kind}))
        answer = study.run()
        failed = [trial for trial in study.trials if trial.state is TrialState.FAILED]
        assert len({trial.candidate.key for trial in failed}) == len(failed)
        assert len(failed) <= 3
        assert answer.candidate == candidate(loader=2)
        decision = next(d for d in study.decisions if d.verdict == "failed")
        assert "broken on purpose" in decision.reason

    def test_an_error_of_the_workload_under_a_candidate_is_the_candidates(self):
        """The reference ran the same code, so the choice is unsupported and the workload is not to blame."""
        study = StudyRun(Machine(SMALL, broken={("products", 2): FailureKind.WORKLOAD_ERROR}))
        study.run()
        kinds = {t.result.failure.kind for t in study.trials if t.state is TrialState.FAILED}
        assert kinds == {FailureKind.UNSUPPORTED}

    def test_what_does_not_fit_is_measured_against_the_nearest_that_does(self):
        study = StudyRun(Machine(TOO_LARGE))
        answer = study.run()
        assert answer.verdict is Verdict.ENABLES_TRAINING
        assert answer.candidate.choices["recompute"] == {"level": 2}
        assert TOO_LARGE.total_ms(answer.candidate) <= 1.02 * TOO_LARGE.best_ms()
        first = study.decisions[0]
        assert (first.candidate, first.verdict) == (candidate(), "failed")
        assert "out_of_memory" in first.reason

    def test_where_only_the_guard_s_reference_does_not_fit_gains_are_over_today_s_settings(self):
        """The reference holds more than a step: it is made of a candidate that needs less."""
        study = StudyRun(Machine(replaced(TOO_LARGE, cap_gb=13.0), seed=2, reference_gb=2.0))
        answer = study.run()
        assert answer.verdict is Verdict.FASTER
        assert "recompute" not in answer.candidate.choices
        true_gain = TOO_LARGE.total_ms(candidate()) / TOO_LARGE.total_ms(answer.candidate)
        assert answer.gain.interval.low < true_gain < answer.gain.interval.high
        assert study.decisions[0].verdict == "measured"
        assert study.driver().run().verdict is Verdict.FASTER

    @pytest.mark.parametrize("kind", [FailureKind.CRASH, FailureKind.TIMEOUT, FailureKind.WORKLOAD_ERROR])
    def test_a_baseline_that_fails_otherwise_is_not_said_to_run_out_of_memory(self, kind):
        class BrokenBaseline(Machine):
            def _break(self, result):
                broken = Failure(kind=kind, phase=Phase.WARM_UP, message="broken on purpose")
                return replace(result, failure=broken, windows=()) if result.candidate.is_baseline else result

        study = StudyRun(BrokenBaseline(replaced(TOO_LARGE, cap_gb=13.0), reference_gb=2.0))
        with pytest.raises(BaselineError, match="broken on purpose"):
            study.run()

    def test_the_baseline_that_does_not_fit_is_run_once(self):
        study = StudyRun(Machine(TOO_LARGE))
        study.run()
        study.run()
        assert sum(c.is_baseline for c in study.machine.candidates_run) == 1

    def test_a_workload_that_never_fits_is_refused(self):
        study = StudyRun(Machine(replaced(TOO_LARGE, cap_gb=1.0)))
        with pytest.raises(BaselineError, match="does not fit into memory"):
            study.run()
        found = study.store.get_study(study.study_id)
        assert found.state is StudyState.FAILED
        assert "smaller global_batch" in found.message

    def test_a_baseline_that_fails_ends_the_study_with_the_reason(self):
        study = StudyRun(Machine(SMALL), strategies=SMALL.strategies)
        study.machine._break = lambda result: replace(
            result, windows=(), guard=replace(result.guard, passed=False)
        )  # a baseline that is not even the same training as itself
        with pytest.raises(BaselineError, match="could not be measured"):
            study.run()
        assert study.store.get_study(study.study_id).state is StudyState.FAILED

    def test_a_baseline_that_its_environment_ended_is_no_end_of_the_study(self):
        """It goes on when it is run again, here or on another machine."""
        study = StudyRun(Machine(SMALL))
        killed = Failure(kind=FailureKind.INFRASTRUCTURE, phase=Phase.BUILD, message="killed by SIGKILL")
        study.machine._break = lambda result: replace(result, windows=(), failure=killed)
        with pytest.raises(RunnerError, match="killed by SIGKILL"):
            study.run()
        assert study.store.get_study(study.study_id).state is StudyState.RUNNING
        study.machine._break = lambda result: result
        assert study.run().verdict is Verdict.FASTER

    def test_a_study_is_not_mixed_with_figures_of_another_machine(self):
        study = StudyRun(Machine(SMALL, interrupt_at=6))
        study.run()
        environment = study.machine.describe()
        other = replace(environment, hardware=replace(environment.hardware, num_cores=64))
        study.machine.describe = lambda: other
        with pytest.raises(StoreError, match="Start a new study"):
            study.run()

    def test_a_study_whose_devices_are_not_here_names_them_and_the_way_out(self):
        def describe():
            raise RunnerError("torch finds no CUDA device here")

        study = StudyRun(Machine(SMALL, interrupt_at=6))
        study.run()
        label = study.machine.describe().hardware.label
        study.machine.describe = describe
        with pytest.raises(
            StoreError, match=rf"started on {label}: the study cannot continue here .* start a new study"
        ):
            study.run()
        assert study.store.get_study(study.study_id).state is StudyState.INTERRUPTED


class TestBudget:
    @pytest.mark.parametrize("trials", [4, 5, 9])
    def test_makes_at_most_as_many_suggestions_as_asked(self, trials):
        study = StudyRun(Machine(SEPARABLE), max_trials=trials)
        study.run()
        assert len([trial for trial in study.trials if trial.purpose not in AFTER_SEARCH]) == trials

    @pytest.mark.parametrize("paired", [False, True])
    @pytest.mark.parametrize("budget_s", [40.0, 70.0])
    def test_stays_within_its_seconds(self, budget_s, paired):
        """Search and confirmation together, with time for both."""
        machine = Machine(SEPARABLE, paired=paired)
        study = StudyRun(machine, budget_s=budget_s, max_trials=None)
        answer = study.run()
        assert answer.gain is not None
        assert machine.now_s <= budget_s + ROUNDING_S
        search_s = sum(t.result.duration_ns for t in study.trials if t.purpose not in AFTER_SEARCH) / 1e9
        assert search_s <= (1 - LEAST_RESERVE) * budget_s + ROUNDING_S

    def test_what_is_compiled_already_is_not_expected_to_be_compiled_again(self):
        """A compilation takes a fifth of the budget: on top of it everything that leaves the model alone is tried, and
        what would compile it anew only where there is time for that.
        """
        machine = Machine(SEPARABLE, noise_sd=0.004, compile_s={"fusion": 55.0})
        strategies = machine.surface.strategies
        for strategy in strategies:
            strategy.recompiles = strategy.name in RECOMPILING
            strategy.trial_cost_s = 55.0 if strategy.name == "fusion" else 0.0
        study = StudyRun(machine, strategies, budget_s=260.0, max_trials=None)
        answer = study.run()
        best = candidate(loader=2, fusion=1, products=2, update=1)  # with or without what changes nothing
        assert machine.surface.total_ms(answer.candidate) == machine.surface.total_ms(best)
        assert machine.now_s <= 260.0 + ROUNDING_S
        cold = [trial for trial in study.trials if trial.result.startup.compile_cold]
        assert len(cold) <= 2

    def test_windows_are_shorter_where_time_is_short(self):
        caps_s = {}
        for budget_s in (200.0, 400.0):
            machine = Machine(SMALL)
            StudyRun(machine, budget_s=budget_s, max_trials=5).run()
            caps_s[budget_s] = machine.caps_s[0]
        assert caps_s[200.0] == pytest.approx(caps_s[400.0] / 2)

    def test_fewer_finalists_rather_than_fewer_blocks(self):
        """Five blocks of three candidates of a second each do not fit into 38 % of 36 s; of two they do."""
        study = StudyRun(Machine(NOISE, noise_sd=0.03, seed=2), budget_s=36.0, max_trials=None, num_finalists=4)
        study.run()
        confirmed = [trial.candidate.key for trial in study.trials if trial.purpose is Purpose.CONFIRM]
        assert len(set(confirmed)) == 2
        assert study.machine.now_s <= 36.0 + ROUNDING_S

    def test_a_confirmation_whose_answer_is_clear_ends_early_and_that_is_said(self):
        study = StudyRun(Machine(SMALL))
        answer = study.run()
        reason = next(d.reason for d in study.decisions if d.stage == "confirm")
        assert "ended early, because the gain was proven" in reason
        assert not [phrase for phrase in answer.no_time_for if "confirmation" in phrase]

    def test_a_confirmation_without_prospect_ends_early_and_claims_nothing(self):
        ended = set()
        for seed in range(4):
            study = StudyRun(Machine(NOISE, noise_sd=0.03, seed=seed))
            assert study.run().verdict is Verdict.NO_SIGNIFICANT_GAIN
            ended |= {decision.reason for decision in study.decisions if decision.stage == "confirm"}
        assert any("ended early, because more blocks were unlikely to prove a gain" in reason for reason in ended)

    def test_blocks_that_an_earlier_version_measured_all_count(self):
        """It ran all that were planned; the answer may not leave out what is stored."""
        study = StudyRun(Machine(SMALL))
        driver = study.driver()
        driver.run()
        run = driver._confirmation
        for number in (2, 3, 4):
            for candidate_ in run._all():
                run._trials.run([candidate_], [Purpose.CONFIRM], number)
        num_runs = len(study.machine.runs)
        assert study.run().gain.num_blocks == 5
        assert len(study.machine.runs) == num_runs

    def test_slow_starts_are_confirmed_in_fewer_blocks_and_that_is_said(self):
        """Five blocks of two starts would take 200 s; no more than one block goes over the budget."""
        start_s = 20.0
        study = StudyRun(Machine(SMALL, start_s=start_s), budget_s=150.0, max_trials=None)
        answer = study.run()
        assert 2 <= answer.gain.num_blocks < 5
        block_s = 2 * (start_s + 5.0)
        assert study.machine.now_s <= 150.0 + block_s
        reason = next(d.reason for d in study.decisions if d.stage == "confirm")
        assert "fewer than the 5 requested, because the budget was spent" in reason

    def test_a_budget_too_short_for_one_trial_is_refused_before_anything_runs(self):
        slow = Machine(SMALL, facts=lambda facts: replace(facts, sample_step_ns=2_000_000_000))
        study = StudyRun(slow, budget_s=20.0)
        with pytest.raises(BudgetError, match=r"20 s is too short.*at least 24 s.*--budget"):
            study.run()
        assert slow.runs == []
        assert study.store.get_study(study.study_id).state is StudyState.FAILED


class TestMoreTime:
    """A study that has ended goes on with another budget."""

    def test_it_searches_on_and_keeps_what_was_measured(self):
        study = StudyRun(Machine(SEPARABLE), budget_s=30.0, max_trials=None)
        first = study.run()
        before = study.trials
        study.store.set_budget(study.study_id, 360.0)
        second = study.run()
        assert study.trials[: len(before)] == before
        assert len(study.trials) > len(before)
        asked = [(t.candidate.key, t.purpose, t.replicate) for t in study.trials if t.purpose is not Purpose.COMPANION]
        assert len(set(asked)) == len(asked)
        assert second.units_per_s >= 0.99 * first.units_per_s
        assert study.machine.now_s <= 360.0 + ROUNDING_S

    def test_blocks_are_not_completed_long_after_they_were_begun(self):
        study = StudyRun(Machine(SEPARABLE), budget_s=60.0, max_trials=None)
        study.run()
        before = len(study.trials)
        study.store.set_budget(study.study_id, 360.0)
        study.run()
        blocks = {}
        for number, trial in enumerate(study.trials):
            if trial.purpose is Purpose.CONFIRM:
                blocks.setdefault(trial.replicate, set()).add(number < before)
        assert {True} in blocks.values()
        assert all(len(times) == 1 for times in blocks.values())

    def test_a_baseline_that_the_budget_ended_is_measured_again(self):
        study = StudyRun(Machine(SMALL, start_s=80.0), budget_s=75.0)
        with pytest.raises(BudgetError, match="Give a larger --budget"):
            study.run()
        study.store.set_budget(study.study_id, 700.0)
        assert study.run().baseline_units_per_s > 0


class TestPreparation:
    """Time that a budget of two minutes leaves for candidates of a job that compiles for long."""

    def job(self, **slowness):
        return Machine(SMALL, **{"look_s": [12.0], "reference_s": 8.0, "start_s": 30.0, **slowness})

    def test_the_reference_is_made_for_the_first_candidate_only(self):
        study = StudyRun(self.job(), budget_s=200.0, max_trials=None)
        study.run()
        assert study.machine.num_references == 1
        assert study.stages.index("baseline") < study.stages.index("running the reference")

    def test_a_study_without_time_for_candidates_makes_no_reference(self):
        study = StudyRun(self.job(start_s=80.0), budget_s=130.0, max_trials=None)
        assert study.run().verdict is Verdict.NOT_SEARCHED
        assert study.machine.num_references == 0

    def test_nothing_is_kept_for_a_confirmation_that_has_no_finalist(self):
        """None of a minute left after the baseline was used, because blocks would have taken as long."""
        study = StudyRun(self.job(), budget_s=130.0, max_trials=None)
        answer = study.run()
        judged = {c.key for c in study.machine.candidates_run if not c.is_baseline}
        assert judged
        assert answer.verdict is not Verdict.NOT_SEARCHED
        assert 100.0 <= study.machine.now_s <= 1.15 * 130.0 + ROUNDING_S

    @pytest.mark.parametrize(("budget_s", "again"), [(130.0, False), (500.0, True)])
    def test_a_job_that_compiles_is_not_compiled_anew_where_that_took_more_than_is_left(self, budget_s, again):
        """Candidates that leave its graph alone are measured instead."""
        machine = Machine(
            SEPARABLE,
            look_s=[20.0],
            compile_s={"fusion": 60.0},
            facts=lambda facts: replace(facts, current={"fusion": {"level": 1}}),
        )
        strategies = machine.surface.strategies
        for strategy in strategies:
            strategy.recompiles = strategy.name in RECOMPILING
            strategy.trial_cost_s = 30.0 if strategy.name == "fusion" else 0.0
        study = StudyRun(machine, strategies, budget_s=budget_s, max_trials=None)
        study.run()
        assert any("loader" in run.choices for run in machine.candidates_run)
        assert any("products" in run.choices for run in machine.candidates_run) == again
        assert machine.now_s <= 1.15 * budget_s + ROUNDING_S

    def test_slow_starts_of_the_baseline_are_not_repeated_for_its_noise(self):
        study = StudyRun(self.job(), budget_s=130.0, max_trials=None)
        study.run()
        assert [purpose for run in study.machine.runs for _, purpose in run].count(Purpose.BASELINE) == 1

    @pytest.mark.parametrize(
        ("slowness", "said"),
        [
            ({"look_s": [200.0]}, "too short"),
            ({"start_s": 200.0}, "spent before the configuration that you run today was measured"),
        ],
    )
    def test_a_budget_bounds_the_preparation(self, slowness, said):
        study = StudyRun(self.job(**slowness), budget_s=75.0)
        with pytest.raises(BudgetError, match=rf"75 s .*{said}.*--budget"):
            study.run()
        assert study.machine.now_s <= 75.0 + ROUNDING_S
        assert study.store.get_study(study.study_id).state is StudyState.FAILED

    def test_a_reference_that_takes_too_long_ends_the_study_with_what_it_lacked(self):
        study = StudyRun(self.job(reference_s=500.0), budget_s=130.0)
        answer = study.run()
        assert answer.verdict is Verdict.NOT_SEARCHED
        assert {d.reason for d in answer.certificate.not_tried} == {"the budget was spent on the guard's reference"}
        assert answer.needed_budget_s > 130.0
        assert study.machine.now_s <= 130.0 + ROUNDING_S
        events = study.store.events(study.study_id)
        (seconds,) = [event.data["seconds"] for event in events if event.kind == "reference_unfinished"]
        assert 0.0 < seconds <= 130.0

    @pytest.mark.parametrize("needs", [1, 2])
    def test_a_reference_that_only_fits_otherwise_is_no_reason_to_call_the_baseline_too_large(self, needs):
        """The reference fits compiled, or with less of it kept: the baseline fits, and gains are over the baseline."""
        study = StudyRun(Machine(replaced(TOO_LARGE, cap_gb=100.0)))
        make, asked = study.machine.make_reference, []

        def make_reference(request, longest_s=None):
            asked.append(request)
            if len(asked) <= needs:
                raise BaselineError("out of memory", out_of_memory=True)
            make(request, longest_s)

        study.machine.make_reference = make_reference
        answer = study.run()
        assert answer.verdict is Verdict.FASTER
        assert answer.baseline_units_per_s > 0
        assert asked[0].choices["recompute"] == {"level": 0} != asked[-1].choices["recompute"]


class Linked(Machine):
    """Machine of several ranks, whose links can be measured.

    Attributes:
        links: Links that are found now; None where the ranks cannot communicate.
        asked: Links that were known each time, and the seconds that were given.
    """

    def __init__(self, links: Topology | None) -> None:
        super().__init__(SMALL)
        self.links = links
        self.asked: list[tuple[Topology | None, float]] = []

    def describe(self) -> Environment:
        return replace(super().describe(), num_ranks=4, num_hosts=2)

    def measure_topology(self, hardware, known, seconds):
        self.asked.append((known, seconds))
        if self.links is None:
            raise RunnerError("the ranks do not find one another")
        return self.links


class TestLinks:
    """Between ranks: measured before the trials, and remembered for later studies of the same hardware."""

    @pytest.fixture
    def links(self) -> Topology:
        return sample_topology(hardware_fingerprint=Machine(SMALL).describe().hardware.fingerprint)

    def test_are_measured_and_known_to_the_search(self, links):
        study = StudyRun(Linked(links), num_ranks=4)
        study.run()
        assert study.machine.asked == [(None, LONGEST_LINKS_S)]
        assert study.store.get_study(study.study_id).environment.topology == links
        assert study.stages.index("measuring the links between ranks") < study.stages.index("running the reference")

    def test_that_an_earlier_study_measured_are_checked_and_kept(self, links):
        first = StudyRun(Linked(links), num_ranks=4)
        first.run()
        again = StudyRun(Linked(links), store=first.store, num_ranks=4)
        again.run()
        assert again.machine.asked == [(links, LONGEST_LINKS_S)]
        assert again.store.get_study(again.study_id).environment.topology == links

    def test_that_have_changed_replace_those_that_were_known(self, links):
        first = StudyRun(Linked(links), num_ranks=4)
        first.run()
        slower = replace(links, whole=replace(links.whole, bytes_per_s=1e6))
        again = StudyRun(Linked(slower), store=first.store, num_ranks=4)
        again.run()
        assert again.store.topology(again.machine.describe().hardware, 4, 2) == slower
        assert first.store.get_study(first.study_id).environment.topology == links

    def test_are_measured_anew_where_that_is_asked_for(self, links):
        first = StudyRun(Linked(links), num_ranks=4)
        first.run()
        again = StudyRun(Linked(links), store=first.store, num_ranks=4, remeasure_links=True)
        again.run()
        assert again.machine.asked == [(None, LONGEST_LINKS_S)]

    def test_of_a_resumed_study_stay_as_they_were(self, links):
        """Its story is told again with the bounds that it had."""
        study = StudyRun(Linked(links), num_ranks=4)
        study.run()
        study.machine.links = replace(links, whole=replace(links.whole, bytes_per_s=1e6))
        study.run()
        assert len(study.machine.asked) == 1
        assert study.store.get_study(study.study_id).environment.topology == links

    def test_that_cannot_be_measured_are_not_known_and_it_says_why(self):
        study = StudyRun(Linked(None), num_ranks=4)
        study.run()
        assert study.store.get_study(study.study_id).environment.topology is None
        (event,) = [e for e in study.store.events(study.study_id) if e.kind == "links_unknown"]
        assert event.data == {"reason": "the ranks do not find one another"}

    def test_take_a_small_part_of_a_short_budget(self, links):
        study = StudyRun(Linked(links), num_ranks=4, budget_s=50.0)
        study.run()
        assert study.machine.asked == [(None, LINKS_SHARE * 50.0)]

    def test_of_one_rank_there_are_none(self, links):
        study = StudyRun(Linked(links))
        study.run()
        assert study.machine.asked == []


class TestInterruption:
    def test_before_the_baseline_was_measured_nothing_can_be_said(self):
        study = StudyRun(Machine(SMALL, interrupt_at=0))
        with pytest.raises(KeyboardInterrupt):
            study.run()
        assert study.store.get_study(study.study_id).state is StudyState.INTERRUPTED
        assert [trial.state for trial in study.trials] == [TrialState.LOST]

    def test_a_resumed_study_interrupted_as_it_looks_again_keeps_its_earlier_answer(self):
        study = StudyRun(Machine(SMALL, interrupt_at=3))
        earlier = study.run()

        def interrupted(longest_s=None):
            raise KeyboardInterrupt

        study.machine.inspect = interrupted
        with pytest.raises(KeyboardInterrupt):
            study.run()
        assert study.store.get_study(study.study_id).message == "the search had not continued"
        assert study.store.recommendation(study.study_id) == earlier

    def test_a_resumed_study_interrupted_as_it_tells_its_story_again_forgets_nothing(self, monkeypatch):
        study = StudyRun(Machine(SMALL, interrupt_at=3))
        earlier = study.run()
        told, update = [], Designer.update

        def interrupted(designer, outcome):
            told.append(outcome)
            if len(told) == 2:
                raise KeyboardInterrupt
            update(designer, outcome)

        monkeypatch.setattr(Designer, "update", interrupted)
        again = study.run()
        assert again.candidate == earlier.candidate
        assert again.units_per_s == pytest.approx(earlier.units_per_s)

    @pytest.mark.parametrize("paired", [False, True])
    def test_a_baseline_that_is_stored_is_reported_though_the_search_was_not_told_of_it(self, paired):
        """Interrupts that come while a transaction is written are held back until its end."""

        class Interrupted(MemoryStudyStore):
            def complete_trials(self, results):
                super().complete_trials(results)
                raise KeyboardInterrupt

        study = StudyRun(Machine(SMALL, paired=paired), store=Interrupted())
        answer = study.run()
        assert answer.candidate == candidate()
        assert answer.certificate.ended == "interrupted"
        assert {trial.state for trial in study.trials} == {TrialState.COMPLETED}

    def test_everything_measured_is_kept_and_the_best_so_far_reported(self):
        study = StudyRun(Machine(SMALL, interrupt_at=3))
        answer = study.run()
        assert answer.verdict is Verdict.UNCONFIRMED
        assert SMALL.total_ms(answer.candidate) < SMALL.total_ms(candidate())
        assert answer.gain is None
        assert answer.certificate.ended == "interrupted"
        assert [t.state for t in study.trials] == [TrialState.COMPLETED] * 3 + [TrialState.LOST]
        assert study.store.get_study(study.study_id).state is StudyState.INTERRUPTED

    def test_blocks_that_were_complete_confirm(self):
        """Two whole blocks give an interval; the third one, cut short, is left out of it."""
        whole = StudyRun(Machine(SMALL))
        whole.run()
        first = next(n for n, trial in enumerate(whole.trials) if trial.purpose is Purpose.CONFIRM)
        size = len({t.candidate.key for t in whole.trials if t.purpose is Purpose.CONFIRM})
        study = StudyRun(Machine(SMALL, interrupt_at=first + 2 * size + 1))
        answer = study.run()
        assert answer.gain.num_blocks == 2

    def test_what_another_search_asked_for_is_kept_and_not_measured_again(self, monkeypatch):
        """Such a study was begun by a version with another search."""
        monkeypatch.setattr(preparation, "make_search", lambda name: RandomSearch())
        study = StudyRun(Machine(SEPARABLE, interrupt_at=6), max_trials=10)
        study.run()
        monkeypatch.undo()
        before = [step for step in study.story() if step[1] != Purpose.BASELINE.value]
        assert len(before) == 5
        answer = study.run()
        told = {trial_id for decision in study.decisions for trial_id in decision.trial_ids}
        assert answer.verdict is Verdict.FASTER
        assert len(study.story()) == len(set(study.story())), "nothing was measured twice"
        searched = [step for step in study.story() if step[1] not in [purpose.value for purpose in AFTER_SEARCH]]
        assert len(searched) <= 10, "what was measured counts for the limit"
        assert told <= {trial.trial_id for trial in study.trials}
        story = study.story()
        again = study.run()
        assert study.story() == story, "told once more, nothing runs"
        assert (again.candidate, again.gain) == (answer.candidate, answer.gain)

    @settings(max_examples=5, deadline=None)
    @given(
        surface=st.sampled_from([SMALL, WALL, PAIR, TOO_LARGE]),
        paired=st.booleans(),
        budget_s=st.sampled_from([60.0, 1e6]),
        cuts=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    )
    def test_a_resumed_study_goes_on_as_if_nothing_had_happened(self, surface, paired, budget_s, cuts):
        """Interrupted at any trials, it asks for the same trials in the same order, repeats none that was
        complete, and gives the same answer.
        """
        limits = {"budget_s": budget_s, "max_trials": 12}
        whole = StudyRun(Machine(surface, paired=paired, noise_sd=0.02), **limits)
        expected = whole.run()
        study = StudyRun(Machine(surface, paired=paired, noise_sd=0.02), **limits)
        for cut in cuts:
            study.machine.interrupt_at = len(study.machine.runs) + cut
            try:
                answer = study.run()
            except KeyboardInterrupt:
                assert cut == 0 or surface is TOO_LARGE  # its first trial is what does not fit
                answer = None
        study.machine.interrupt_at = None
        answer = study.run()
        assert study.story() == whole.story()
        assert len(study.machine.runs) == len(whole.machine.runs)
        assert (answer.candidate, answer.gain, answer.verdict) == (
            expected.candidate,
            expected.gain,
            expected.verdict,
        )
        assert [(d.stage, d.verdict, d.candidate) for d in study.decisions] == [
            (d.stage, d.verdict, d.candidate) for d in whole.decisions
        ]

    @pytest.mark.parametrize("looks_s", [(60.0, 1.0), (1.0, 30.0)])
    def test_what_a_look_takes_the_next_time_changes_no_story(self, looks_s):
        """Files are warm, or the machine is busier: the same results make the same next trials."""
        whole = StudyRun(Machine(SMALL, look_s=[looks_s[0]]), budget_s=110.0, max_trials=None)
        whole.run()
        study = StudyRun(Machine(SMALL, look_s=looks_s, interrupt_at=1), budget_s=110.0, max_trials=None)
        study.run()
        study.run()
        searched = [[row for row in run.story() if row[1] != "confirm"] for run in (study, whole)]
        assert searched[0] == searched[1]

    def test_a_completed_study_is_told_again_without_running_anything(self):
        study = StudyRun(Machine(SMALL))
        answer = study.run()
        num_runs = len(study.machine.runs)
        again = study.run()
        assert len(study.machine.runs) == num_runs
        assert (again.candidate, again.gain) == (answer.candidate, answer.gain)

    def test_a_study_whose_time_is_spent_still_reaches_its_answer(self):
        """Killed in the confirmation, with less time left than a trial takes."""
        slow = Machine(SMALL, facts=lambda facts: replace(facts, sample_step_ns=500_000_000))
        study = StudyRun(slow, budget_s=60.0, max_trials=None)
        whole = StudyRun(Machine(SMALL), budget_s=60.0, max_trials=None)
        whole.run()
        slow.interrupt_at = len(whole.machine.runs) - 1
        study.run()
        assert study.run().gain is not None


# --- strategies and surfaces ------------------------------------------------------------------


class Dropping(FakeStrategy):
    """A strategy of which `loader` changes the training."""

    def __init__(self, name: str, category: Category, levels: int, numerics: Numerics) -> None:
        super().__init__(name, category, levels)
        self._numerics = numerics

    def numerics(self, choice):
        return self._numerics if self.name == "loader" else super().numerics(choice)


class Curing(FakeStrategy):
    """A strategy that usually cures what it acts on, and so is part of a recipe."""

    usual_realisation = 0.5


def named(surface: Surface) -> dict[str, FakeStrategy]:
    return {strategy.name: strategy for strategy in surface.strategies}


def replaced(surface: Surface, **changes) -> Surface:
    return Surface(**{**{name: getattr(surface, name) for name in surface.__dataclass_fields__}, **changes})


def input_strategies() -> list[FakeStrategy]:
    """Two that cure waiting for data, by the names that the diagnosis calls for, and the small surface's."""
    return [
        Curing("dataset_cache", Category.DATA_WAIT, 1),
        Curing("cpu_threads", Category.DATA_WAIT, 1),
        *(named(SEPARABLE)[name] for name in ("products", "layout", "backend", "update", "threads")),
    ]


def replace_factors(strategies) -> Surface:
    """The cache cures the wait; threads bring nothing beside it; the rest as on the pair surface."""
    factors = {name: PAIR.factors[name] for name in ("products", "layout", "backend", "update", "threads")}
    wait = Category.DATA_WAIT
    return replaced(PAIR, factors={"dataset_cache": (wait, (0.2,)), "cpu_threads": (wait, (1.0,)), **factors})


def replace_factor_of_update(factor: float) -> Surface:
    return replaced(SMALL, factors={**SMALL.factors, "update": (Category.OPTIMIZER, (factor,))})


def _products_need_the_loader(monkeypatch) -> None:
    combine = Space.combine

    def combined(self, what, moves):
        found = combine(self, what, moves)
        refused = found is not None and "products" in found.choices and "loader" not in found.choices
        return None if refused else found

    monkeypatch.setattr(Space, "combine", combined)


class TestContributions:
    """Contributions of parts are measured by leaving each out, in blocks of new starts."""

    def test_each_part_is_left_out_of_the_answer_in_turns(self):
        machine = Machine(SMALL, paired=True, seed=1)
        study = StudyRun(machine)
        answer = study.run()
        runs = [run for run in machine.runs if run[0][1] is Purpose.CONTRIBUTION]
        without = {candidate(products=2).key, candidate(loader=2).key}
        assert len(runs) >= 2
        assert all({c.key for c, _ in run} == {answer.candidate.key, *without} for run in runs)
        true = {
            "loader": SMALL.total_ms(candidate(products=2)) / SMALL.total_ms(BEST_OF_SMALL),
            "products": SMALL.total_ms(candidate(loader=2)) / SMALL.total_ms(BEST_OF_SMALL),
        }
        assert [part.strategy for part in answer.parts] == ["loader", "products"]
        for part in answer.parts:
            assert part.interval.low < true[part.strategy] < part.interval.high
            assert part.num_blocks == len(runs)
            assert contribution_of(answer, part).told == f"measured by leaving it out, in {len(runs)} blocks"

    def test_the_search_measures_none(self):
        """Its trials chose the answer, so what they say of its parts is flattered."""
        whole = StudyRun(Machine(SMALL))
        whole.run()
        first = next(n for n, run in enumerate(whole.machine.runs) if run[0][1] is Purpose.CONFIRM)
        answer = StudyRun(Machine(SMALL, interrupt_at=first)).run()
        assert (answer.verdict, len(answer.parts)) == (Verdict.UNCONFIRMED, 2)
        assert [(part.gain, part.interval, part.num_blocks) for part in answer.parts] == [(None, None, 0)] * 2

    def test_an_only_part_needs_no_further_start(self):
        study = StudyRun(Machine(SMALL), skip=("products", "update"))
        answer = study.run()
        [part] = answer.parts
        assert Purpose.CONTRIBUTION not in {trial.purpose for trial in study.trials}
        assert contribution_of(answer, part).ratio == answer.gain.ratio

    def test_a_part_that_another_needs_is_left_out_with_it(self, monkeypatch):
        """As a fused kernel is without which a CUDA graph cannot record the step."""
        _products_need_the_loader(monkeypatch)
        study = StudyRun(Machine(replace_factor_of_update(0.7), paired=True, seed=1))
        answer = study.run()
        parts = {part.strategy: part for part in answer.parts}
        assert {name: part.together for name, part in parts.items()} == {
            "loader": ("products",),
            "products": (),
            "update": (),
        }
        found = contribution_of(answer, parts["loader"])
        surface = study.machine.surface
        true = surface.total_ms(candidate(update=1)) / surface.total_ms(answer.candidate)
        assert found.interval.low < true < found.interval.high
        assert found.told.endswith(", with products, which needs it")

    def test_a_part_that_all_others_need_contributes_the_whole_gain(self, monkeypatch):
        _products_need_the_loader(monkeypatch)
        study = StudyRun(Machine(SMALL, paired=True, seed=1))
        answer = study.run()
        [loader] = [part for part in answer.parts if part.strategy == "loader"]
        measured = {t.candidate.key for t in study.trials if t.purpose is Purpose.CONTRIBUTION}
        assert measured == {answer.candidate.key, candidate(loader=2).key}
        found = contribution_of(answer, loader)
        assert (found.ratio, found.interval) == (answer.gain.ratio, answer.gain.interval)
        assert found.told.endswith(", with products, which needs it")

    def test_the_verdict_does_not_depend_on_them(self):
        """They come after it: an interrupt among them leaves the same answer."""
        whole = StudyRun(Machine(SMALL))
        answer = whole.run()
        first = next(n for n, run in enumerate(whole.machine.runs) if run[0][1] is Purpose.CONTRIBUTION)
        cut = StudyRun(Machine(SMALL, interrupt_at=first))
        found = cut.run()
        assert (found.verdict, found.candidate, found.gain) == (answer.verdict, answer.candidate, answer.gain)
        assert [contribution_of(found, part) for part in found.parts] == [None, None]

    def test_what_was_measured_of_them_is_not_measured_again(self):
        whole = StudyRun(Machine(SMALL))
        answer = whole.run()
        blocks = [n for n, run in enumerate(whole.machine.runs) if run[0][1] is Purpose.CONTRIBUTION]
        study = StudyRun(Machine(SMALL, interrupt_at=blocks[-1]))
        study.run()
        found = study.run()
        done = [step for step in study.story() if step[1] == Purpose.CONTRIBUTION.value]
        assert len(done) == len(set(done)) == len([s for s in whole.story() if s[1] == Purpose.CONTRIBUTION.value])
        assert [part.num_blocks for part in found.parts] == [part.num_blocks for part in answer.parts]

    def test_an_interrupt_in_the_first_block_leaves_no_part_out(self):
        whole = StudyRun(Machine(SMALL))
        whole.run()
        first = next(n for n, run in enumerate(whole.machine.runs) if run[0][1] is Purpose.CONTRIBUTION)
        study = StudyRun(Machine(SMALL, interrupt_at=first + 1))
        study.run()
        study.run()
        assert study.story() == whole.story()

    @pytest.mark.parametrize(("left_s", "measured"), [(20.0, []), (30.0, ["loader"]), (40.0, ["loader", "products"])])
    def test_parts_that_two_blocks_do_not_fit_for_are_not_measured(self, monkeypatch, left_s, measured):
        """A start of 5 s and a window of 1 s: 24 s for one part, 36 s for both. What matters least is left out."""
        run = ContributionRun.run

        def with_time(self, answer):
            self._view.budget_s = self._view.elapsed_s + left_s
            run(self, answer)

        monkeypatch.setattr(ContributionRun, "run", with_time)
        study = StudyRun(Machine(SMALL, start_s=5.0))
        answer = study.run()
        assert (answer.verdict, len(answer.parts)) == (Verdict.FASTER, 2)
        assert sorted(part.strategy for part in answer.parts if part.gain is not None) == measured
        taken_s = sum(t.result.duration_ns for t in study.trials if t.purpose is Purpose.CONTRIBUTION) / 1e9
        assert taken_s <= left_s

    @pytest.mark.parametrize("left_s", [40.0, 100.0])
    def test_starts_that_are_slower_than_in_the_search_do_not_outrun_the_budget(self, monkeypatch, left_s):
        """The budget is exceeded by one start at most."""
        run, machine = ContributionRun.run, Machine(SMALL, start_s=2.0)
        began_s = []

        def slowed(self, answer):
            began_s.append(machine.now_s)
            self._view.budget_s = self._view.elapsed_s + left_s
            machine.start_s = 20.0
            run(self, answer)

        monkeypatch.setattr(ContributionRun, "run", slowed)
        study = StudyRun(machine)
        study.run()
        assert Purpose.CONTRIBUTION in {trial.purpose for trial in study.trials}
        assert machine.now_s - began_s[0] <= left_s + 23.0

    def test_told_again_without_time_it_has_the_same_contributions(self, monkeypatch):
        """Also where one part could not be left out: everything is stored."""
        machine = Machine(SEPARABLE)
        study = StudyRun(machine, only=("loader", "products", "fusion"), max_trials=12)
        run = machine.run

        def failing(specs, purposes, *rest):
            failure = Failure(kind=FailureKind.CRASH, phase=Phase.BUILD, message="on purpose")
            return [
                replace(r, failure=failure, windows=())
                if r.purpose is Purpose.CONTRIBUTION and "loader" not in r.candidate.choices
                else r
                for r in run(specs, purposes, *rest)
            ]

        machine.run = failing
        answer = study.run()
        measured = {part.strategy: part.gain for part in answer.parts}
        assert measured["loader"] is None
        assert any(gain is not None for gain in measured.values())
        num_runs = len(machine.runs)
        monkeypatch.setattr(ContributionRun, "_left_s", lambda self: 0.0)
        again = study.run()
        assert {part.strategy: part.gain for part in again.parts} == pytest.approx(measured)
        assert len(machine.runs) == num_runs

    def test_starts_of_another_day_make_no_block(self, monkeypatch):
        """A study that goes on with more time than it had takes up no part that it had left out."""
        run = ContributionRun.run

        def with_time(self, answer):
            self._view.budget_s = self._view.elapsed_s + left_s
            run(self, answer)

        monkeypatch.setattr(ContributionRun, "run", with_time)
        left_s = 30.0
        study = StudyRun(Machine(SMALL, start_s=5.0))
        study.run()
        left_s = 500.0
        answer = study.run()
        assert [part.strategy for part in answer.parts if part.gain is not None] == ["loader"]

    def test_the_only_part_that_can_be_left_out_is(self):
        answer = StudyRun(Machine(TOO_LARGE)).run()
        assert answer.verdict is Verdict.ENABLES_TRAINING
        [loader] = [part for part in answer.parts if part.strategy == "loader"]
        without = answer.candidate.with_choice("loader", {})
        true = TOO_LARGE.total_ms(without) / TOO_LARGE.total_ms(answer.candidate)
        assert contribution_of(answer, loader).interval.low < true < contribution_of(answer, loader).interval.high

    def test_what_does_not_run_without_a_part_has_no_contribution(self):
        machine = Machine(SMALL)
        study = StudyRun(machine)
        run = machine.run

        def failing(specs, purposes, *rest):
            results = run(specs, purposes, *rest)
            failure = Failure(kind=FailureKind.CRASH, phase=Phase.BUILD, message="on purpose")
            return [
                replace(r, failure=failure, windows=())
                if r.purpose is Purpose.CONTRIBUTION and r.candidate == candidate(products=2)
                else r
                for r in results
            ]

        machine.run = failing
        answer = study.run()
        assert {part.strategy: part.gain is None for part in answer.parts} == {"loader": True, "products": False}
        assert sum(c == candidate(products=2) for r in machine.runs for c, p in r if p is Purpose.CONTRIBUTION) == 1
