"""From the profiled step to the step without a profiler."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiled import breakdown_of

from steptune.tuner.costs.categories import HOST_CATEGORIES, Category
from steptune.tuner.profiling.breakdown import MAX_EVENT_OVERHEAD_NS, rescale, with_epoch_restart
from steptune.tuner.records import Breakdown

names = st.sampled_from([c.value for c in Category])
times = st.dictionaries(names, st.integers(0, 10**9), min_size=1)
NOTHING: dict[str, int] = {}


@given(
    categories=times,
    num_recorded=st.dictionaries(names, st.integers(0, 1000)),
    num_steps=st.integers(1, 9),
    unprofiled=st.integers(1, 10**7),
    on_cpu=st.booleans(),
)
def test_the_sum_is_the_unprofiled_step(
    categories: dict[str, int], num_recorded: dict[str, int], num_steps: int, unprofiled: int, on_cpu: bool
) -> None:
    scaled = rescale(categories, num_steps, unprofiled, num_recorded=num_recorded, on_cpu=on_cpu)
    if not any(categories.values()):
        assert scaled == {}
        return
    assert sum(scaled.values()) == unprofiled
    assert min(scaled.values()) >= 0
    assert set(scaled) == set(categories)


@given(categories=times, num_recorded=st.dictionaries(names, st.integers(0, 1000)), share=st.floats(0.01, 1))
def test_nothing_grows_where_the_profiler_made_the_step_longer(
    categories: dict[str, int], num_recorded: dict[str, int], share: float
) -> None:
    """But for the rounding to whole nanoseconds."""
    unprofiled = int(share * sum(categories.values()))
    scaled = rescale(categories, 1, unprofiled, num_recorded=num_recorded, on_cpu=False)
    assert all(scaled[name] <= categories[name] + 1 for name in scaled)


CATEGORIES = {"compute_matmul": 40_000, "data_wait": 20_000, "host": 30_000, "launch_latency": 10_000}


def test_the_excess_is_taken_in_proportion_to_what_was_recorded() -> None:
    """On a device the profiler does not make kernels longer, however many it records."""
    recorded = {"compute_matmul": 500, "data_wait": 4, "host": 12, "launch_latency": 4}
    assert rescale(CATEGORIES, 1, 80_000, num_recorded=recorded, on_cpu=False) == {
        "compute_matmul": 40_000,
        "data_wait": 16_000,
        "host": 18_000,
        "launch_latency": 6_000,
    }


def test_on_a_cpu_operators_are_slowed_too() -> None:
    recorded = {"compute_matmul": 30, "host": 10}
    assert rescale(CATEGORIES, 1, 80_000, num_recorded=recorded, on_cpu=True) == {
        "compute_matmul": 25_000,
        "data_wait": 20_000,
        "host": 25_000,
        "launch_latency": 10_000,
    }


def test_none_gives_more_than_it_has_and_the_others_give_the_rest() -> None:
    recorded = {"host": 10, "launch_latency": 90}
    assert rescale(CATEGORIES, 1, 75_000, num_recorded=recorded, on_cpu=False) == {
        "compute_matmul": 40_000,
        "data_wait": 20_000,
        "host": 15_000,
        "launch_latency": 0,
    }


def test_what_records_do_not_explain_is_chance_and_taken_from_host_and_waits_alike() -> None:
    assert rescale(CATEGORIES, 1, 80_000, num_recorded=NOTHING, on_cpu=False) == {
        "compute_matmul": 40_000,
        "data_wait": 13_333,
        "host": 20_000,
        "launch_latency": 6_667,
    }


def test_an_event_explains_a_few_microseconds_at_most() -> None:
    """A loader that happened to be slow while it was profiled is not the overhead of the few events beside it."""
    assert rescale(CATEGORIES, 1, 80_000, num_recorded={"host": 1}, on_cpu=False) == {
        "compute_matmul": 40_000,
        "data_wait": 14_035,
        "host": (30_000 - MAX_EVENT_OVERHEAD_NS) * 40 // 57,
        "launch_latency": 7_018,
    }


def test_on_a_cpu_without_records_all_shrinks_alike() -> None:
    named = {"compute_matmul": 60_000, "host": 20_000, "data_wait": 20_000}
    assert rescale(named, 1, 60_000, num_recorded=NOTHING, on_cpu=True) == {
        "compute_matmul": 36_000,
        "host": 12_000,
        "data_wait": 12_000,
    }


@pytest.mark.parametrize("on_cpu", [True, False])
def test_where_profiled_steps_were_the_faster_ones_all_grow_alike(on_cpu: bool) -> None:
    named = {"compute_matmul": 60_000, "host": 20_000, "data_wait": 20_000}
    grown = rescale(named, 1, 200_000, num_recorded={"host": 5}, on_cpu=on_cpu)
    assert grown == {name: 2 * value for name, value in named.items()}


def test_where_the_host_has_too_little_what_waits_for_other_ranks_gives_next() -> None:
    """Their hosts were slowed as well: the collective waited for them."""
    named = {"compute_matmul": 60_000, "communication": 30_000, "host": 10_000}
    assert rescale(named, 1, 75_000, num_recorded={"host": 5}, on_cpu=False) == {
        "compute_matmul": 60_000,
        "communication": 15_000,
        "host": 0,
    }


def test_kernels_shrink_only_where_nothing_else_is_left() -> None:
    named = {"compute_matmul": 60_000, "communication": 30_000, "host": 10_000}
    assert rescale(named, 1, 45_000, num_recorded={"host": 5}, on_cpu=False) == {
        "compute_matmul": 45_000,
        "communication": 0,
        "host": 0,
    }


def test_steps_are_averaged() -> None:
    named = {"compute_matmul": 60_000, "host": 30_000}
    assert rescale(named, 3, 26_000, num_recorded={"host": 90}, on_cpu=False) == {
        "compute_matmul": 20_000,
        "host": 6_000,
    }


def test_only_the_documented_categories_are_the_host_s() -> None:
    assert {"host", "launch_latency", "optimizer_host", "synchronisation", "allocation"} == HOST_CATEGORIES


class TestEpochRestart:
    def breakdown(self, **rescaled: int) -> Breakdown:
        plain = breakdown_of({Category.MATMUL: 1.0})
        return Breakdown(
            rank=0,
            device="cpu",
            num_steps=1,
            step_time_ns=plain.step_time_ns,
            categories=plain.categories,
            quality=plain.quality,
            rescaled=rescaled,
        )

    def test_is_added_to_the_rescaled_step(self) -> None:
        longer = with_epoch_restart(self.breakdown(compute_matmul=900, data_wait=100), 50)
        assert longer.rescaled == {"compute_matmul": 900, "data_wait": 100, "epoch_restart": 50}
        assert longer.categories == self.breakdown().categories

    def test_is_added_to_what_was_seen_of_it(self) -> None:
        assert with_epoch_restart(self.breakdown(epoch_restart=7), 50).rescaled == {"epoch_restart": 57}

    def test_of_an_unrescaled_breakdown_changes_nothing(self) -> None:
        assert with_epoch_restart(self.breakdown(), 50) == self.breakdown()
