"""Changes that a comparison of two runs reports, how sure it is, and what explains them."""

from __future__ import annotations

import pytest
from analysed import make_analysis, make_breakdown, make_gaps, make_kernel, make_rank
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import stats

from steptune.tuner.profiling.comparison import ComparisonError, compare, compare_breakdowns, shortened
from steptune.tuner.records import CaptureQuality, GapSite

MATMUL, HOST, DATA = "compute_matmul", "host", "data_wait"
TIMES = st.dictionaries(st.sampled_from([MATMUL, HOST, DATA, "queued"]), st.integers(0, 10**9), min_size=1)
SIDES = st.lists(TIMES, min_size=1, max_size=6)


def changes(comparison):
    return {d.name: d.change_ns for d in comparison.categories}


@given(before=SIDES, after=SIDES)
def test_the_changes_of_the_categories_sum_to_that_of_the_step(before, after):
    compared = compare_breakdowns([make_breakdown(before)], [make_breakdown(after)])
    assert sum(changes(compared).values()) == pytest.approx(compared.step.change_ns, abs=1e-3)
    assert [abs(d.change_ns) for d in compared.categories] == sorted(map(abs, changes(compared).values()), reverse=True)


@given(
    before=st.lists(st.integers(0, 10**9), min_size=2, max_size=8, unique=True),
    after=st.lists(st.integers(0, 10**9), min_size=2, max_size=8, unique=True),
)
def test_intervals_are_those_of_welch(before, after):
    compared = compare_breakdowns(
        [make_breakdown([{HOST: value} for value in before])], [make_breakdown([{HOST: value} for value in after])]
    )
    expected = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    [host] = [d for d in compared.categories if d.name == HOST]
    assert (host.low_ns, host.high_ns) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-3)
    assert host.significant == (expected.low > 0 or expected.high < 0)


def test_steps_without_any_spread_differ_for_certain():
    compared = compare_breakdowns([make_breakdown([{HOST: 5}] * 3)], [make_breakdown([{HOST: 7}] * 3)])
    assert (compared.step.low_ns, compared.step.high_ns) == (2, 2)
    assert compared.step.significant


def test_a_run_compared_with_itself_has_not_changed():
    side = [make_breakdown([{HOST: 5, MATMUL: 9}, {HOST: 7, MATMUL: 8}])]
    compared = compare_breakdowns(side, side)
    assert set(changes(compared).values()) == {0}
    assert not any(d.significant for d in (*compared.categories, compared.step))


def test_one_step_has_no_interval_and_says_so():
    one, many = make_breakdown([{HOST: 5}]), make_breakdown([{HOST: 5}, {HOST: 6}])
    both = compare_breakdowns([one], [one])
    assert both.step.low_ns is None
    assert both.step.high_ns is None
    assert not both.step.significant
    assert "each side has one step: no interval can be computed" in both.notes
    half = compare_breakdowns([one], [many], labels=("old.json", "new.json"))
    assert half.step.low_ns is None
    assert "old.json has one step: no interval can be computed" in half.notes


def test_ranks_are_averaged_step_by_step():
    ranks = [make_breakdown([{HOST: 4}, {HOST: 8}]), make_breakdown([{HOST: 8}, {HOST: 4}], rank=1)]
    compared = compare_breakdowns(ranks, [make_breakdown([{HOST: 6}, {HOST: 6}])])
    assert compared.num_steps == (2, 2)
    # Each step is 6 on average over the ranks, so there is no spread at all.
    assert (compared.step.low_ns, compared.step.high_ns) == (0, 0)


def test_steps_are_as_without_the_profiler_where_both_sides_know_that():
    before = make_breakdown([{HOST: 10, MATMUL: 10}, {HOST: 30, MATMUL: 10}], rescaled={HOST: 10, MATMUL: 10})
    after = make_breakdown([{HOST: 10, MATMUL: 10}] * 2, rescaled={HOST: 5, MATMUL: 10})
    compared = compare_breakdowns([before], [after])
    assert changes(compared) == pytest.approx({HOST: -5, MATMUL: 0})
    half = compare_breakdowns([before], [replace(after, rescaled={})])
    assert changes(half)[HOST] == pytest.approx(-10)
    assert any("for only one side" in note for note in half.notes)


def test_an_untrusted_capture_is_named():
    bad = make_breakdown([{HOST: 1}], quality=CaptureQuality(num_events=1, num_steps=1, problems=("half is missing",)))
    assert "after cannot be trusted: half is missing" in compare_breakdowns([make_breakdown([{HOST: 1}])], [bad]).notes


def test_a_side_without_breakdowns_is_refused():
    with pytest.raises(ComparisonError, match=r"after has no breakdown: profile it first"):
        compare_breakdowns([make_breakdown([{HOST: 1}])], [])


def test_kernels_and_gaps_explain_the_difference_per_step():
    """The sides have two and four steps: counts and times are per step."""
    before = make_rank(
        make_breakdown([{MATMUL: 10}] * 2),
        kernels=(make_kernel("stays", 4, 800), make_kernel("same", 2, 200), make_kernel("goes", 2, 1000)),
        gaps={"cuda:0": make_gaps(GapSite(category=DATA, kernel_after="stays", count=2, total_ns=6000))},
    )
    after = make_rank(
        make_breakdown([{MATMUL: 10}] * 4),
        kernels=(make_kernel("stays", 4, 800), make_kernel("same", 4, 400), make_kernel("comes", 4, 400)),
        gaps={"cuda:0": make_gaps(GapSite(category=DATA, kernel_after="stays", count=4, total_ns=400))},
    )
    compared = compare(make_analysis(before), make_analysis(after))
    kernels = {k.name: (k.state, k.change_ns, k.before_count, k.after_count) for k in compared.kernels}
    assert list(kernels) == ["goes", "stays", "comes"]
    assert kernels == {"goes": ("gone", -500, 1, 0), "stays": ("changed", -200, 2, 1), "comes": ("new", 100, 0, 1)}
    [gap] = compared.gaps
    assert (gap.name, gap.category, gap.change_ns, gap.before_count, gap.after_count) == ("stays", DATA, -2900, 1, 1)


def test_of_two_ranks_the_mean_counts():
    def rank(number, total):
        return make_rank(make_breakdown([{MATMUL: 10}], rank=number), kernels=(make_kernel("k", 2, total),))

    compared = compare(make_analysis(rank(0, 100), rank(1, 300)), make_analysis(rank(0, 100)))
    [kernel] = compared.kernels
    assert (kernel.before_ns, kernel.after_ns, kernel.before_count) == (200, 100, 2)
    assert any("means over 2 and 1 device" in note for note in compared.notes)


def test_other_devices_are_named():
    side = make_rank(make_breakdown([{MATMUL: 10}]))
    compared = compare(make_analysis(side), make_analysis(replace(side, device_names={"cuda:0": "H200"})))
    assert "different devices: A100 and H200" in compared.notes


def test_shortening_leaves_the_breakdown_alone():
    side = make_rank(make_breakdown([{MATMUL: 10}]), kernels=tuple(make_kernel(str(n), 1, 9 - n) for n in range(9)))
    short = shortened(make_analysis(side), 3)
    assert [k.name for k in short.ranks[0].kernels] == ["0", "1", "2"]
    assert short.ranks[0].breakdowns == side.breakdowns


def test_kernels_add_up_to_the_categories_whatever_the_number_of_devices():
    """Two devices that each multiply for 10 ns a step, in one process or in two: per step and device it is 10."""
    one, other = make_breakdown([{MATMUL: 10}]), make_breakdown([{MATMUL: 10}], device="cuda:1")
    both = replace(make_rank(one, kernels=(make_kernel("k", 2, 20),)), breakdowns=(one, other))
    alone = make_rank(one, kernels=(make_kernel("other", 1, 10),))
    compared = compare(make_analysis(both), make_analysis(alone))
    kernels = {k.name: (k.before_ns, k.after_ns, k.before_count) for k in compared.kernels}
    assert kernels == {"k": (10, 0, 1), "other": (0, 10, 0)}
    assert [(d.before_ns, d.after_ns) for d in compared.categories] == [(10, 10)]
    assert any(
        note.startswith("all figures, including kernels and gaps, are per step and device: means over 2 and 1 device")
        for note in compared.notes
    )


def test_a_cpu_and_a_gpu_are_not_compared_in_silence():
    on_gpu = make_rank(make_breakdown([{MATMUL: 10}]))
    on_cpu = make_rank(make_breakdown([{MATMUL: 90}], device="cpu"), device_names={})
    notes = compare(make_analysis(on_cpu), make_analysis(on_gpu), labels=("old", "new")).notes
    assert any("different kinds of device: old ran on a CPU, new ran on a GPU" in note for note in notes)
    assert not any("different kinds" in note for note in compare(make_analysis(on_cpu), make_analysis(on_cpu)).notes)


def test_devices_without_a_name_may_be_others():
    side = make_rank(make_breakdown([{MATMUL: 10}]))
    notes = compare(make_analysis(side), make_analysis(replace(side, device_names={})), labels=("old", "new")).notes
    assert any(note.startswith("devices are not named in new") for note in notes)


def test_other_numbers_of_steps_and_ranks_are_said():
    two, three = (make_rank(make_breakdown([{MATMUL: 10}] * count)) for count in (2, 3))
    notes = compare(make_analysis(two), make_analysis(replace(three, num_ranks=8))).notes
    assert "the sides have 2 and 3 steps: each shows the mean over its own steps" in notes
    assert "runs of 1 rank and of 8 ranks" in notes
    assert compare(make_analysis(two), make_analysis(two)).notes == ()
