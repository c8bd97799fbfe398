"""Comparison of two trials: the step by their windows, and what their profiles say of the difference."""

from __future__ import annotations

import pytest
from analysed import make_analysis, make_breakdown, make_kernel, make_rank
from builders import sample_environment, sample_hardware, sample_result, sample_window
from msgspec.structs import replace
from report_builders import make_study, make_trials
from scipy import stats

from steptune.service.comparing import compared
from steptune.tuner.profiling.comparison import ComparisonError
from steptune.tuner.profiling.trial_comparison import compare_trials, different_hardware
from steptune.tuner.records import GapSite, TrialProfile
from steptune.tuner.trace_records import ModuleStats

MATMUL, DATA = "compute_matmul", "data_wait"


def trial(durations_ns=(100, 110, 105), *, kernels=(), gaps=(), steps=({MATMUL: 60, DATA: 40},) * 2, **fields):
    """Windows of ten steps each, and no epoch restarts."""
    windows = tuple(
        sample_window(number, num_steps=10, duration_ns=10 * duration) for number, duration in enumerate(durations_ns)
    )
    profile = TrialProfile(kernels=kernels, gap_sites=gaps)
    return sample_result(
        windows=windows, breakdowns=(make_breakdown(list(steps)),), profile=profile, epoch_restart_ns=None, **fields
    )


def test_the_step_is_measured_by_the_windows_with_welchs_interval():
    before, after = [100, 110, 105, 103], [80, 84, 79]
    compared = compare_trials(trial(before), trial(after))
    assert compared.measured is not None
    assert (compared.measured.before_ns, compared.measured.after_ns) == pytest.approx((104.5, 81))
    expected = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    assert (compared.measured.low_ns, compared.measured.high_ns) == pytest.approx((expected.low, expected.high))
    assert any(note.startswith("each configuration ran once") for note in compared.notes)


def test_long_windows_count_for_more():
    """100 ns a step over 30 steps and 200 ns over 10 are 5000 ns over 40."""
    windows = (sample_window(0, num_steps=30, duration_ns=3000), sample_window(1, num_steps=10, duration_ns=2000))
    compared = compare_trials(replace(trial(), windows=windows), trial())
    assert compared.measured.before_ns == pytest.approx(125)


def test_epoch_restarts_are_part_of_the_measured_step():
    restarting = replace(trial(), epoch_restart_ns=600, steps_per_epoch=10)
    compared = compare_trials(restarting, trial())
    assert compared.measured.before_ns == pytest.approx(compared.measured.after_ns + 60)


def test_a_void_window_does_not_count():
    before = trial()
    disturbed = replace(
        before, windows=(*before.windows, sample_window(9, num_steps=1, duration_ns=10**9, void="busy"))
    )
    assert compare_trials(before, disturbed).measured.change_ns == 0


def test_categories_have_intervals_by_their_steps_and_sum_to_the_profiled_step():
    after = trial(steps=({MATMUL: 60, DATA: 4}, {MATMUL: 60, DATA: 6}))
    compared = compare_trials(trial(), after)
    [data] = [d for d in compared.categories if d.name == DATA]
    assert (data.change_ns, data.significant) == (-35, True)
    assert sum(d.change_ns for d in compared.categories) == compared.step.change_ns


def test_kernels_and_gaps_explain_the_difference_per_step():
    gap = GapSite(category=DATA, kernel_after="k", count=2, total_ns=80)
    before = trial(kernels=(make_kernel("k", 2, 120),), gaps=(gap,))
    after = trial(kernels=(make_kernel("k", 2, 100),), gaps=(replace(gap, total_ns=20),), steps=({MATMUL: 60},) * 2)
    compared = compare_trials(before, after)
    assert [(k.name, k.change_ns, k.before_count) for k in compared.kernels] == [("k", -10, 1)]
    assert [(g.name, g.category, g.change_ns) for g in compared.gaps] == [("k", DATA, -30)]


def test_what_may_only_be_below_the_end_of_a_list_is_neither_new_nor_gone():
    """A profile lists the kernels with the most time: `small` may well run on the other side too."""
    before = trial(kernels=(make_kernel("both", 2, 100), make_kernel("small", 2, 10), make_kernel("large", 2, 90)))
    after = trial(kernels=(make_kernel("both", 2, 100), make_kernel("comes", 2, 40)))
    changed = {k.name: k.state for k in compare_trials(before, after).kernels}
    assert changed == {"large": "gone", "comes": "new"}


def test_a_trial_that_was_not_profiled_is_refused_with_the_reason():
    with pytest.raises(ComparisonError, match="after has no breakdown, because it was measured, but not profiled"):
        compare_trials(trial(), replace(trial(), breakdowns=()))


def test_steps_of_different_batches_are_no_measure_of_speed():
    """A larger batch takes longer a step, and may be faster all the same."""
    small, large = trial(), trial()
    large = replace(large, windows=tuple(replace(w, num_samples=4 * w.num_samples) for w in large.windows))
    per_step = small.windows[0].num_samples / small.windows[0].num_steps
    expected = (
        f"a step has {per_step:g} samples on one side and {4 * per_step:g} on the other: compare samples per second"
    )
    assert expected in compare_trials(small, large).notes
    assert not any("samples" in note for note in compare_trials(small, trial()).notes)


def test_other_hardware_and_other_versions_are_named():
    one = sample_environment("cuda")
    assert different_hardware(one, one) == different_hardware(one, None) == []
    [said] = different_hardware(one, sample_environment("cpu"))
    assert said.startswith("different hardware: ")
    newer = replace(one, hardware=replace(sample_hardware("cuda"), versions={**one.hardware.versions, "torch": "9.9"}))
    [said] = different_hardware(one, newer)
    assert said.startswith("different machines of the same kind: torch ")
    assert said.endswith("9.9")


@pytest.mark.parametrize("kept", [(True, True), (True, False)])
def test_modules_of_kept_analyses_are_compared_with_the_cause(kept: tuple[bool, bool]) -> None:
    """Where both trials have one. How many steps they are of is the result's word: user code may write the file."""
    results = [trial(), trial()]
    trials = [
        replace(one, trial_id=str(n), result=r)
        for n, (one, r) in enumerate(zip(make_trials(results), results, strict=True))
    ]
    study = make_study()
    modules = [
        ModuleStats(name="Net_0.Linear_0", count=2, forward_ns=0, backward_ns=0, own_ns=own_ns, dtypes=(dtype,))
        for own_ns, dtype in ((1000, "float"), (400, "bfloat16"))
    ]
    steps = [make_breakdown([{MATMUL: 1}] * number) for number in (1, 7)]
    analyses = {
        str(n): make_analysis(make_rank(step, modules=(module,)))
        for n, (step, module, known) in enumerate(zip(steps, modules, kept, strict=True))
        if known
    }
    found = compared((study, trials[0]), (study, trials[1]), None, analysis_of=analyses.get, top=10)
    causes = [(one.name, one.before_ns, one.after_ns, one.cause) for one in found.modules]
    expected = ("Net_0.Linear_0", 500, 200, "computes matmuls in bfloat16 instead of float")
    assert causes == ([expected] if all(kept) else [])
