"""Trials on a machine that is never quiet: they are measured all the same, and it is said."""

import subprocess
import sys

import pytest
from msgspec.structs import replace
from search_builders import SMALL, Machine, StudyRun
from trial_builders import prepare, reference

from steptune.tuner.errors import BaselineError
from steptune.tuner.records import MeasureSettings, Verdict
from steptune.tuner.search.confirmation import MAX_BLOCKS
from steptune.tuner.trials.fake import NOISE

BUSY = MeasureSettings(window_s=0.1, min_rounds=2, max_rounds=3, cap_s=1.0, foreign_cpu_share=0.02)


def test_windows_beside_a_hog_are_marked_and_count_unless_the_machine_must_be_quiet(tmp_path):
    prepared = prepare(reference("regression", "Regression"), tmp_path / "study", with_reference=False)
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        specs = [prepared.spec(guard=False, profile=False) for _ in range(2)]
        for result in prepared.run(*specs, settings=BUSY):
            assert result.ok
            assert any("of the cores" in window.marked for window in result.clean_windows if window.marked)
        specs = [prepared.spec(guard=False, profile=False) for _ in range(2)]
        strict = prepared.run(*specs, settings=replace(BUSY, quiet_machine=True))
        assert not any(window.marked for result in strict for window in result.windows)
        assert any(window.void for result in strict for window in result.windows)
    finally:
        hog.kill()
        hog.wait()
        prepared.runner.close()


class Busy(Machine):
    """Others use most of the cores, in every window."""

    def run(self, specs, purposes, settings, group, listener):
        said = "other programs used 74% of the cores"
        changes = {"void": said} if settings.quiet_machine else {"marked": said}
        return [
            replace(r, windows=tuple(replace(w, foreign_cpu_share=0.74, **changes) for w in r.windows))
            for r in super().run(specs, purposes, settings, group, listener)
        ]


def test_a_gain_that_shows_all_the_same_is_found():
    assert StudyRun(Busy(SMALL, paired=True)).run().verdict is Verdict.FASTER


def test_where_nothing_can_be_told_the_answer_is_that_the_machine_is_busy():
    answer = StudyRun(Busy(NOISE, noise_sd=0.1)).run()
    assert answer.verdict is Verdict.INCONCLUSIVE
    assert answer.candidate.is_baseline
    assert answer.foreign_cpu_share == pytest.approx(0.74)


def test_a_quiet_machine_with_the_same_noise_has_no_significant_gain():
    assert StudyRun(Machine(NOISE, noise_sd=0.1)).run().verdict is Verdict.NO_SIGNIFICANT_GAIN


@pytest.mark.parametrize("seed", range(8))
def test_no_study_is_inconclusive_for_a_wide_interval_while_its_budget_lasts(seed):
    """Starts that differ this much give a wide interval after the planned blocks."""
    study = StudyRun(Machine(SMALL, noise_sd=0.6, seed=seed), budget_s=4000.0, num_finalists=1)
    answer = study.run()
    gain = answer.gain or answer.unproven_gain
    assert answer.verdict is not Verdict.INCONCLUSIVE or (gain is not None and gain.num_blocks == MAX_BLOCKS)


def test_a_study_that_asked_for_a_quiet_machine_fails_with_the_way_out():
    study = StudyRun(Busy(SMALL), measure=MeasureSettings(quiet_machine=True))
    with pytest.raises(BaselineError, match=r"other programs used 74% of the cores.*without --quiet-machine"):
        study.run()
