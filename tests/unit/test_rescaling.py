"""From the profiled step to the step without a profiler."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiled import breakdown_of

from tuner.profiling.breakdown import rescale, with_epoch_restart
from tuner.profiling.categories import HOST_CATEGORIES, Category
from tuner.records import Breakdown

times = st.dictionaries(st.sampled_from([c.value for c in Category]), st.integers(0, 10**9), min_size=1)


@given(categories=times, num_steps=st.integers(1, 9), unprofiled=st.integers(1, 10**7), on_cpu=st.booleans())
def test_the_sum_is_the_unprofiled_step(
    categories: dict[str, int], num_steps: int, unprofiled: int, on_cpu: bool
) -> None:
    if not any(categories.values()):
        assert rescale(categories, num_steps, unprofiled, on_cpu=on_cpu) == {}
        return
    scaled = rescale(categories, num_steps, unprofiled, on_cpu=on_cpu)
    assert sum(scaled.values()) == unprofiled
    assert min(scaled.values()) >= 0
    assert set(scaled) == set(categories)


def test_on_a_device_only_host_categories_shrink() -> None:
    """The profiler does not make kernels longer."""
    categories = {Category.MATMUL: 40, Category.DATA_WAIT: 20, Category.HOST: 30, Category.LAUNCH_LATENCY: 10}
    named = {category.value: 1000 * value for category, value in categories.items()}
    assert rescale(named, 1, 80_000, on_cpu=False) == {
        "compute_matmul": 40_000,
        "data_wait": 20_000,
        "host": 15_000,
        "launch_latency": 5_000,
    }


def test_on_a_cpu_all_but_the_wait_for_data_shrinks() -> None:
    """The host records every operator that it runs; a loader's worker does not run slower for that."""
    named = {"compute_matmul": 60_000, "host": 20_000, "data_wait": 20_000}
    assert rescale(named, 1, 60_000, on_cpu=True) == {"compute_matmul": 30_000, "host": 10_000, "data_wait": 20_000}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_where_profiled_steps_were_the_faster_ones_all_grow_alike(on_cpu: bool) -> None:
    named = {"compute_matmul": 60_000, "host": 20_000, "data_wait": 20_000}
    grown = rescale(named, 1, 200_000, on_cpu=on_cpu)
    assert grown == {name: 2 * value for name, value in named.items()}


def test_where_the_host_has_too_little_to_give_all_shrink_alike() -> None:
    named = {"compute_matmul": 90_000, "host": 10_000}
    assert rescale(named, 1, 50_000, on_cpu=False) == {"compute_matmul": 45_000, "host": 5_000}


def test_steps_are_averaged() -> None:
    assert rescale({"compute_matmul": 90_000}, 3, 30_000, on_cpu=True) == {"compute_matmul": 30_000}


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
