"""Studies of jobs that take most of a device: what does not fit beside another trial is measured alone."""

import pytest
from search_builders import SMALL, Machine, StudyRun, candidate

from steptune.tuner.records import FailureKind, Purpose, StudyState, Verdict
from steptune.tuner.trials.fake import Surface

DEVICE_GB = 80.0
BEST = candidate(loader=2, products=2)


def filling(share: float, **memory_gb: tuple[float, ...]) -> Surface:
    """A baseline that takes this share of a device."""
    return replace_surface(SMALL, base_gb=DEVICE_GB * share, cap_gb=DEVICE_GB, memory_gb=memory_gb)


def replace_surface(surface: Surface, **changes) -> Surface:
    return Surface(**{**vars(surface), **changes})


class Optimist(Machine):
    """A machine that says of everything that it fits together, as one does on which others use memory, too."""

    def fits_together(self, peaks_bytes) -> bool:
        return True


@pytest.mark.parametrize("share", [0.3, 0.55, 0.6, 0.9, 0.99])
def test_whatever_share_of_a_device_the_baseline_takes_it_is_tuned(share):
    study = StudyRun(Machine(filling(share), paired=True, device_gb=DEVICE_GB))
    answer = study.run()
    assert (answer.verdict, answer.candidate) == (Verdict.FASTER, BEST)
    assert not any(trial.result.failure for trial in study.trials), "no trial ran out of memory"
    first, *others = study.machine.runs
    assert len(first) == 1, "nothing is known of its memory: the first start is alone"
    assert any(len(run) > 1 for run in others) is (share < 0.5)


@pytest.mark.parametrize("share", [0.6, 0.9])
def test_memory_that_runs_out_beside_another_trial_is_no_verdict(share):
    study = StudyRun(Optimist(filling(share), device_gb=DEVICE_GB))
    answer = study.run()
    assert (answer.verdict, answer.candidate) == (Verdict.FASTER, BEST)
    asked = [trial.result for trial in study.trials if trial.purpose is not Purpose.COMPANION]
    assert all(result.ok for result in asked)
    repeated = [trial for trial in study.trials if trial.result.repeated]
    assert all(trial.attempts == 2 for trial in repeated)
    assert {attempt.failure.kind for t in repeated for attempt in t.result.repeated} == {FailureKind.OUT_OF_MEMORY}
    told = [event.data["trial"] for event in study.store.events(study.study_id) if event.kind == "trial_repeated"]
    assert told == [trial.trial_id for trial in repeated]


def test_what_did_not_fit_together_is_not_put_together_again():
    study = StudyRun(Optimist(filling(0.6), device_gb=DEVICE_GB))
    study.run()
    assert sum(len(run) > 1 for run in study.machine.runs) == 1


def test_a_candidate_that_needs_more_than_the_device_fails_alone():
    study = StudyRun(Optimist(filling(0.6, products=(0.0, 40.0)), device_gb=DEVICE_GB))
    answer = study.run()
    assert answer.candidate == candidate(loader=2)
    failed = [t for t in study.trials if t.result.failure and t.candidate.choices.get("products") == {"level": 2}]
    assert failed
    assert all(t.result.failure.kind is FailureKind.OUT_OF_MEMORY for t in failed)


def test_a_companion_that_ran_out_of_memory_leaves_its_trial_a_result():
    """Whichever of two trials the device had no room for, both took no windows beside each other."""

    class Reversed(Optimist):
        def run(self, specs, purposes, settings, group, listener):
            results = super().run(specs[::-1], purposes[::-1], settings, group, listener)
            return results[::-1]

    study = StudyRun(Reversed(filling(0.6), device_gb=DEVICE_GB))
    assert study.run().verdict is Verdict.FASTER
    companion, baseline = (trial.result for trial in study.trials[1:3])
    assert companion.failure.kind is FailureKind.OUT_OF_MEMORY
    assert baseline.ok
    assert len(baseline.repeated) == 1


def test_a_resumed_study_runs_nothing_again_that_was_repeated():
    study = StudyRun(Optimist(filling(0.6), device_gb=DEVICE_GB))
    study.machine.interrupt_at = 4
    study.run()
    measured = study.story()
    assert any(trial.result.repeated for trial in study.trials)
    study.run()
    assert study.store.get_study(study.study_id).state is StudyState.COMPLETED
    assert study.story()[: len(measured)] == measured
    asked = [row for row in study.story() if row[1] != "companion"]
    assert len(asked) == len(set(asked))
