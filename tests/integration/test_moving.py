"""Studies that go on in another place: figures of two machines are never compared but by ratios to a baseline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from search_builders import SMALL, Machine, StudyRun, candidate

from steptune.tuner.errors import BaselineError, StoreError
from steptune.tuner.records import Environment, FailureKind, Purpose, StudyState, TrialState, Verdict
from steptune.tuner.search.search_run import MOVED_STARTS
from steptune.tuner.search.view import StudyInterrupt
from steptune.tuner.trials.fake import NOISE, PAIR, Surface, fake_environment

BEST_OF_SMALL = candidate(loader=2, products=2)


def slowed(surface: Surface, factor: float) -> Surface:
    """Surface of the same workload on a machine that takes longer for everything."""
    return replace_surface(surface, {category: factor * ms for category, ms in surface.base_ms.items()})


def replace_surface(surface: Surface, base_ms) -> Surface:
    from dataclasses import replace as replaced

    return replaced(surface, base_ms=base_ms)


def moved(surface: Surface, *, at: int, factor: float, paired: bool = False, **settings) -> StudyRun:
    """A study that is interrupted at a run and goes on where everything takes `factor` times as long."""
    study = StudyRun(Machine(surface, noise_sd=0.005, paired=paired, interrupt_at=at), **settings)
    study.place = "first"
    interrupted(study)
    study.move_to(Machine(slowed(surface, factor), noise_sd=0.005, paired=paired, seed=1), "second")
    return study


def interrupted(study: StudyRun) -> None:
    try:
        study.run()
    except KeyboardInterrupt:
        assert study.store.get_study(study.study_id).state is StudyState.INTERRUPTED


class TestMoving:
    @pytest.mark.parametrize("paired", [False, True])
    @pytest.mark.parametrize("factor", [0.5, 3.0])
    @pytest.mark.parametrize("at", [2, 6, 9])
    def test_a_machine_of_another_speed_changes_nothing_about_the_answer(self, at, factor, paired):
        """Compared by their rates, everything measured after the move would look three times as slow, or twice as
        fast as the baseline.
        """
        answer = moved(SMALL, at=at, factor=factor, paired=paired, max_trials=16).run()
        true_gain = SMALL.total_ms(candidate()) / SMALL.total_ms(BEST_OF_SMALL)
        assert answer.verdict is Verdict.FASTER
        assert answer.candidate == BEST_OF_SMALL
        assert answer.gain.ratio == pytest.approx(true_gain, rel=0.03)

    @pytest.mark.parametrize("factor", [0.5, 3.0])
    def test_where_nothing_pays_a_faster_machine_does_not_look_like_a_gain(self, factor):
        assert moved(NOISE, at=6, factor=factor).run().verdict is Verdict.NO_SIGNIFICANT_GAIN

    def test_the_baseline_and_the_incumbent_are_measured_again_first(self):
        study = moved(SMALL, at=3, factor=2.0)
        before = len([trial for trial in study.trials if trial.state is TrialState.COMPLETED])
        study.run()
        after = study.story()[before:]
        again = [(label, purpose) for label, purpose, _ in after[:4]]
        assert {purpose for _, purpose in again} == {"moved"}
        assert len({label for label, _ in again}) == 2
        assert ("baseline", "moved") in again
        assert "moved" not in {purpose for _, purpose, _ in after[4:]}

    def test_the_rates_of_an_answer_are_of_the_last_place(self):
        answer = moved(SMALL, at=6, factor=4.0).run()
        rate = 1000 * 32 / (4 * SMALL.total_ms(candidate()))
        assert answer.baseline_units_per_s == pytest.approx(rate, rel=0.03)

    def test_the_prediction_is_not_widened_by_how_machines_differ(self):
        stayed = StudyRun(Machine(SMALL, noise_sd=0.005)).run().gain.prediction
        went = moved(SMALL, at=6, factor=4.0).run().gain.prediction
        assert went.high - went.low < 3 * (stayed.high - stayed.low)

    def test_a_block_of_the_confirmation_is_of_one_place(self):
        whole = StudyRun(Machine(SMALL, noise_sd=0.005))
        whole.run()
        first = next(n for n, trial in enumerate(whole.trials) if trial.purpose is Purpose.CONFIRM)
        study = moved(SMALL, at=first + 1, factor=2.0)
        answer = study.run()
        blocks: dict[int, list[str]] = {}
        for trial in study.trials:
            if trial.purpose is Purpose.CONFIRM and trial.result is not None:
                blocks.setdefault(trial.replicate, []).append(trial.result.place)
        assert all(places.count("second") >= 2 for places in blocks.values())
        assert answer.gain.ratio == pytest.approx(100 / 48, rel=0.03)

    def test_a_baseline_that_fails_in_the_new_place_ends_the_study(self):
        study = moved(SMALL, at=3, factor=1.0)
        for name in SMALL.factors:
            study.machine.broken[(name, 0)] = FailureKind.CRASH
        study.machine._break = lambda result: replace(result, windows=()) if result.candidate.is_baseline else result
        with pytest.raises(BaselineError, match="moved to other cores or devices"):
            study.run()
        assert study.store.get_study(study.study_id).state is StudyState.FAILED

    @settings(max_examples=10, deadline=None)
    @given(
        surface=st.sampled_from([SMALL, PAIR]),
        paired=st.booleans(),
        cuts=st.lists(st.tuples(st.integers(1, 8), st.sampled_from("abc")), min_size=1, max_size=4),
    )
    def test_a_study_that_moved_is_told_again_without_running_anything(self, surface, paired, cuts):
        """However often it moved, and whenever: its story is a function of what is stored."""
        study = StudyRun(Machine(surface, paired=paired, noise_sd=0.01))
        study.place = "start"
        for cut, place in cuts:
            study.machine.interrupt_at = len(study.machine.runs) + cut
            interrupted(study)
            factor = {"a": 1.0, "b": 2.0, "c": 0.5}[place]
            study.move_to(Machine(slowed(surface, factor), paired=paired, noise_sd=0.01, seed=len(place)), place)
        answer = study.run()
        story = study.story()
        study.machine.runs.clear()
        again = study.run()
        assert study.machine.runs == []
        assert study.story() == story
        assert (again.candidate, again.gain, again.verdict) == (answer.candidate, answer.gain, answer.verdict)


class TestOtherHardware:
    def test_is_refused_where_nobody_allowed_it(self):
        study = moved(SMALL, at=6, factor=2.0)
        study.machine.describe = other_environment
        with pytest.raises(StoreError, match="measurements of different machines"):
            study.run()

    def test_goes_on_where_the_user_allowed_it_and_is_the_answers_hardware(self):
        study = moved(SMALL, at=6, factor=2.0, max_trials=16)
        study.machine.describe = other_environment
        study.other_hardware = True
        answer = study.run()
        assert answer.candidate == BEST_OF_SMALL
        assert answer.hardware == other_environment().hardware
        assert study.store.get_study(study.study_id).environment == other_environment()


def other_environment() -> Environment:
    environment = fake_environment()
    return replace(environment, hardware=replace(environment.hardware, cpu_name="another"))


class TestInterrupts:
    @pytest.mark.parametrize("state", [StudyState.PAUSED, StudyState.QUEUED])
    def test_a_pause_recommends_nothing(self, state):
        study = StudyRun(Machine(SMALL))
        study.machine.run = raising_after(study.machine.run, 8, StudyInterrupt(state))
        with pytest.raises(StudyInterrupt) as caught:
            study.run()
        assert caught.value.state is state
        assert study.store.recommendation(study.study_id) is None

    def test_a_cancelled_study_recommends_the_best_so_far(self):
        study = StudyRun(Machine(SMALL))
        study.machine.run = raising_after(study.machine.run, 4, StudyInterrupt(StudyState.CANCELLED, recommends=True))
        answer = study.run()
        assert answer.verdict is Verdict.UNCONFIRMED
        assert study.store.get_study(study.study_id).state is StudyState.CANCELLED


def raising_after(run, count, error):
    calls = []

    def interrupted_run(*arguments):
        calls.append(arguments)
        if len(calls) > count:
            raise error
        return run(*arguments)

    return interrupted_run


class TestAHostThatIsReplaced:
    @pytest.mark.parametrize("paired", [False, True])
    @pytest.mark.parametrize("at", [1, 2])
    def test_the_baseline_is_measured_again_before_the_search_goes_on(self, at: int, paired: bool) -> None:
        """The trial that ran then was repeated in the new place, so that nobody announces the move."""
        study = StudyRun(Machine(SMALL, noise_sd=0.005, paired=paired), max_trials=16)
        study.place = "first"
        measured = study.machine.run

        def run(*arguments):
            if len(study.machine.runs) == at:
                study.place, study.machine.surface = "second", slowed(SMALL, 3.0)
            return measured(*arguments)

        study.machine.run = run
        answer = study.run()
        assert answer.verdict is Verdict.FASTER
        assert answer.candidate == BEST_OF_SMALL
        purposes = [purpose for runs in study.machine.runs for _, purpose in runs]
        first = purposes.index(Purpose.MOVED)
        assert {runs[0][1] for runs in study.machine.runs[at + 1 : at + 1 + MOVED_STARTS]} == {Purpose.MOVED}
        assert {t.result.place for t in study.trials[first:]} == {"second"}
