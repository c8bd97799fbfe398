"""The most that can be saved: never negative, never too small."""

import dataclasses
from typing import ClassVar

import pytest
from builders import sample_environment, sample_facts
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from profiled import STEP_NS, breakdown_of, situation

from steptune.tuner.costs.bounds import (
    Situation,
    above_roofline,
    compute_floor_ns,
    removable,
)
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Breakdown, Calibration, CaptureQuality, Choice, Device, InputActivity, ModelFacts
from steptune.tuner.strategies import STRATEGIES, strategy_named
from steptune.tuner.strategies.data_loading.costs import input_without_workers, pipelined_input

C = Category
DEFAULTS = {strategy.name: dict(strategy.defaults) for strategy in STRATEGIES}
WORKERS: Choice = DEFAULTS["data_loading"]
O1: Choice = {"level": "O1", "dtype": "bfloat16"}
TF32: Choice = {"level": "tf32", "dtype": None}
TF32_FLAG: Choice = {**DEFAULTS["backend_flags"], "tf32": True}


def model(flops: int | None = 0, parameters: int = 0) -> ModelFacts:
    return ModelFacts(
        num_parameters=parameters,
        parameter_bytes=4 * parameters,
        num_parameter_tensors=1,
        flops_per_step=flops,
    )


def measured(
    shares: dict[Category, float],
    *,
    flops: int | None = 0,
    parameters: int = 0,
    peak: float = 0.0,
    bandwidth: float = 0.0,
    **choices: Choice,
) -> Situation:
    peaks = {"float32": peak, "tf32": 2 * peak, "bfloat16": 4 * peak} if peak else {}
    return situation(
        breakdown_of(shares),
        calibration=Calibration(matmul_flops_per_s=peaks, copy_bytes_per_s=bandwidth),
        choices={**DEFAULTS, **choices},
        model=model(flops, parameters),
        batch_bytes=0,
    )


@st.composite
def situations(draw) -> Situation:
    times = {c.value: draw(st.integers(0, 10**6)) for c in Category}
    breakdown = Breakdown(
        rank=0,
        device="cpu",
        num_steps=draw(st.integers(1, 5)),
        step_time_ns=sum(times.values()),
        categories=times,
        quality=CaptureQuality(num_events=1, num_steps=1),
    )
    peak = draw(st.sampled_from([0.0, 1e6, 1e9, 1e12]))
    calibration = Calibration(
        matmul_flops_per_s={"float32": peak, "bfloat16": 2 * peak} if peak else {},
        copy_bytes_per_s=draw(st.sampled_from([0.0, 1e6, 1e9])),
    )
    workers = draw(st.integers(0, 2))
    return situation(
        breakdown,
        calibration=calibration,
        choices={"data_loading": {"num_workers": workers}},
        model=model(draw(st.one_of(st.none(), st.integers(0, 10**7))), draw(st.integers(0, 10**6))),
        batch_bytes=draw(st.integers(0, 10**6)),
    )


class TestEveryBound:
    @given(found=situations(), workers=st.integers(1, 64))
    def test_is_a_share_of_the_step(self, found: Situation, workers: int) -> None:
        for bound in (
            removable(found, *Category),
            removable(found),
            above_roofline(found),
            above_roofline(found, C.MATMUL, dtype="bfloat16"),
            above_roofline(found, C.ELEMENTWISE),
            pipelined_input(found, workers),
        ):
            assert 0 <= bound <= 1 + 1e-9

    @given(found=situations(), categories=st.lists(st.sampled_from(list(Category)), unique=True), data=st.data())
    def test_removing_more_saves_the_sum_and_never_less(
        self, found: Situation, categories: list[Category], data: st.DataObject
    ) -> None:
        """Categories are disjoint: a joint bound is the sum of its parts, so it is at most that."""
        cut = data.draw(st.integers(0, len(categories)))
        first, second = categories[:cut], categories[cut:]
        joint = removable(found, *categories)
        assert joint == pytest.approx(removable(found, *first) + removable(found, *second))
        assert joint >= max(removable(found, *first), removable(found, *second)) - 1e-12

    @given(found=situations())
    def test_the_roofline_never_gives_more_than_vanishing_would(self, found: Situation) -> None:
        assert above_roofline(found) <= removable(found, *COMPUTE) + 1e-12
        assert above_roofline(found, C.MATMUL) <= removable(found, C.MATMUL) + 1e-12

    @given(found=situations(), fewer=st.integers(1, 8), more=st.integers(1, 8))
    def test_more_workers_can_never_hide_less(self, found: Situation, fewer: int, more: int) -> None:
        assert pipelined_input(found, fewer + more) >= pipelined_input(found, fewer)

    @given(found=situations(), workers=st.integers(1, 64))
    def test_workers_hide_no_more_than_the_wait(self, found: Situation, workers: int) -> None:
        assert pipelined_input(found, workers) <= removable(found, C.DATA_WAIT, C.EPOCH_RESTART) + 1e-12


class TestRoofline:
    def test_floating_point_operations_over_the_peak(self) -> None:
        """200 kFLOP at 1 GFLOP/s take 0.2 ms of the 0.5 ms of compute in a step of 1 ms."""
        found = measured({C.MATMUL: 0.5}, flops=200_000, peak=1e9)
        assert compute_floor_ns(found) == pytest.approx(200_000)
        assert above_roofline(found) == pytest.approx(0.3)

    def test_a_faster_format_has_a_lower_floor(self) -> None:
        found = measured({C.MATMUL: 0.5}, flops=200_000, peak=1e9)
        assert compute_floor_ns(found, "bfloat16") == pytest.approx(50_000)
        assert above_roofline(found, dtype="bfloat16") > above_roofline(found)

    def test_compulsory_bytes_over_the_bandwidth(self) -> None:
        """Parameters are read twice and their gradients written once: 3 x 1000 x 4 bytes at 1e8 bytes/s."""
        found = measured({C.MATMUL: 0.5}, parameters=1000, bandwidth=1e8)
        assert compute_floor_ns(found) == pytest.approx(120_000)
        assert compute_floor_ns(found, "bfloat16") == pytest.approx(60_000)

    def test_the_larger_floor_counts(self) -> None:
        assert compute_floor_ns(
            measured({C.MATMUL: 0.5}, flops=200_000, peak=1e9, parameters=1000, bandwidth=1e8)
        ) == pytest.approx(200_000)

    @pytest.mark.parametrize("unknown", [{"flops": None, "peak": 1e9}, {"flops": 200_000}, {"parameters": 10}])
    def test_what_is_unknown_sets_no_floor(self, unknown: dict) -> None:
        found = measured({C.MATMUL: 0.5}, **unknown)
        assert compute_floor_ns(found) == 0
        assert above_roofline(found) == pytest.approx(0.5)

    def test_the_floor_never_exceeds_what_was_measured(self) -> None:
        assert above_roofline(measured({C.MATMUL: 0.1}, flops=10**9, peak=1e9)) == 0

    def test_products_are_what_has_a_floor(self) -> None:
        """Element-wise work may vanish into its neighbours when it is fused."""
        found = measured({C.MATMUL: 0.5, C.ELEMENTWISE: 0.3}, flops=200_000, peak=1e9)
        assert above_roofline(found, C.ELEMENTWISE) == pytest.approx(0.3)
        assert above_roofline(found, C.MATMUL, C.ELEMENTWISE) == pytest.approx(0.6)

    def test_ranks_share_the_work_of_the_global_batch(self) -> None:
        import dataclasses

        import msgspec

        one = measured({C.MATMUL: 0.5}, flops=200_000, peak=1e9)
        two = dataclasses.replace(one, environment=msgspec.structs.replace(one.environment, num_ranks=2))
        assert compute_floor_ns(two) == compute_floor_ns(one) / 2


class TestArithmetic:
    """200 kFLOP: 0.2 ms in FP32, 0.1 ms in TF32, 0.05 ms in 16 bits."""

    def taking(self, share: float, **choices: Choice) -> Situation:
        return measured({C.MATMUL: share}, flops=200_000, peak=1e9, **choices)

    @pytest.mark.parametrize(
        ("share", "choices", "floor"),
        [
            (0.6, {}, 0.2),
            (0.6, {"precision": TF32}, 0.1),
            (0.6, {"backend_flags": TF32_FLAG}, 0.1),
            (0.6, {"precision": O1}, 0.05),
            (0.6, {"precision": O1, "backend_flags": TF32_FLAG}, 0.05),
        ],
    )
    @pytest.mark.parametrize("strategy", ["compile", "cpu_threads", "memory_format", "moe_experts"])
    def test_what_leaves_the_precision_alone_computes_in_that_of_the_incumbent(self, strategy, share, choices, floor):
        """A 16-bit incumbent's products still have most of their time above their own floor, not above that of FP32."""
        found = strategy_named(strategy)
        assert found.bound(self.taking(share, **choices), dict(found.defaults)) == pytest.approx(share - floor)

    def test_faster_than_fp32_can_be_is_no_fp32(self) -> None:
        """Convolutions of FP32 take TF32 by default: the bound of another layout is not nothing."""
        assert above_roofline(self.taking(0.15)) == pytest.approx(0.05)
        assert above_roofline(self.taking(0.08)) == pytest.approx(0.03)

    def test_a_peak_that_was_measured_a_little_low_is_still_the_peak(self) -> None:
        assert above_roofline(self.taking(0.19)) == 0

    def test_a_flag_brings_tf32_only_to_what_computes_in_fp32(self) -> None:
        flags = strategy_named("backend_flags")
        assert flags.bound(self.taking(0.6), TF32_FLAG) == pytest.approx(0.5)
        assert flags.bound(self.taking(0.6, precision=O1), TF32_FLAG) == pytest.approx(0.55)

    @pytest.mark.parametrize(("choice", "floor"), [(O1, 0.05), (TF32, 0.1)])
    def test_another_precision_computes_in_its_own(self, choice: Choice, floor: float) -> None:
        assert strategy_named("precision").bound(self.taking(0.6), choice) == pytest.approx(0.6 - floor)

    def test_products_that_are_not_meant_may_have_the_floor_to_themselves(self) -> None:
        """All matmuls need 0.2 ms, of which attention may have had its 0.1 ms: other matmuls need the rest."""
        found = measured({C.MATMUL: 0.15, C.ATTENTION: 0.1}, flops=200_000, peak=1e9)
        assert above_roofline(found, C.MATMUL) == pytest.approx(0.05)


class TestPipelinedInput:
    def loading(self, wait: float, workers: int = 0, restart: float = 0.0) -> Situation:
        shares = {C.DATA_WAIT: wait, C.EPOCH_RESTART: restart, C.MATMUL: 1 - wait - restart}
        return situation(breakdown_of(shares), choices={"data_loading": {"num_workers": workers}})

    def test_one_worker_hides_the_wait_behind_the_step(self) -> None:
        assert pipelined_input(self.loading(0.3), 1) == pytest.approx(0.3)

    def test_no_batch_comes_sooner_than_its_share_of_the_workers(self) -> None:
        """0.8 ms a batch, 0.2 ms of training: a worker gives a batch each 0.4 ms at best, two each 0.2 ms."""
        assert pipelined_input(self.loading(0.8), 1) == pytest.approx(0.6)
        assert pipelined_input(self.loading(0.8), 2) == pytest.approx(0.8)
        assert pipelined_input(self.loading(0.8), 99) == pytest.approx(0.8)

    def test_with_workers_already_the_wait_says_nothing_about_a_batch(self) -> None:
        assert pipelined_input(self.loading(0.8, workers=2), 1) == pytest.approx(0.8)

    def test_starting_epochs_can_be_hidden_too(self) -> None:
        assert pipelined_input(self.loading(0.1, restart=0.2), 2) == pytest.approx(0.3)

    def test_a_step_that_does_not_wait_gains_nothing(self) -> None:
        assert pipelined_input(self.loading(0.0), 8) == 0


class TestInputWithoutWorkers:
    """A step of 1 ms whose loader has workers, in batches of 10."""

    def loading(self, sample_ns: int, **shares: float) -> Situation:
        taken = {C(name): share for name, share in shares.items()}
        found = situation(
            breakdown_of({**taken, C.MATMUL: 1 - sum(taken.values())}), choices={"data_loading": {"num_workers": 4}}
        )
        dataset = replace(found.workload.dataset, sample_ns=sample_ns)
        return dataclasses.replace(found, workload=replace(found.workload, dataset=dataset, global_batch=10))

    def choosing(self, found: Situation, **others: Choice) -> Situation:
        return dataclasses.replace(found, choices={**DEFAULTS, "data_loading": {**WORKERS, "num_workers": 4}, **others})

    def test_what_loads_in_no_time_needs_no_workers(self) -> None:
        assert input_without_workers(self.loading(0, epoch_restart=0.5, data_wait=0.1)) == pytest.approx(0.6)

    def test_a_batch_takes_its_time(self) -> None:
        assert input_without_workers(self.loading(20_000, epoch_restart=0.5)) == pytest.approx(0.3)

    def test_a_batch_of_several_takes_theirs(self) -> None:
        found = self.choosing(
            self.loading(20_000, epoch_restart=0.5), larger_global_batch={"factor": 2, "rule": "linear"}
        )
        assert input_without_workers(found) == pytest.approx(0.1)

    def test_what_loads_slowly_loses_by_it(self) -> None:
        assert input_without_workers(self.loading(200_000, data_wait=0.1)) < 0

    def test_the_bound_does_not_rest_on_the_time_of_a_sample(self) -> None:
        """Since stored samples, and those asked for as a batch, come sooner than one by one at the first look."""
        found = self.choosing(self.loading(200_000, epoch_restart=0.3), cpu_threads={"num_threads": 8, "bind": None})
        bound = strategy_named("data_loading").bound(found, {**WORKERS, "num_workers": 0})
        assert bound == pytest.approx(0.3)

    @pytest.mark.parametrize(("sample_ns", "tried"), [(1_000, True), (200_000, False)])
    def test_it_is_expected_of_no_workers(self, sample_ns: int, tried: bool) -> None:
        strategy, found = strategy_named("data_loading"), self.loading(sample_ns, epoch_restart=0.3)
        expected = strategy.expected(self.choosing(found), {**WORKERS, "num_workers": 0})
        assert expected is not None
        assert (expected > 0.1) == tried

    def test_it_is_tried_where_there_are_workers_today(self) -> None:
        with_workers = sample_facts(current={"data_loading": {"num_workers": 4}})
        for facts, found in ((with_workers, True), (sample_facts(current={}), False)):
            choices = strategy_named("data_loading").choices(sample_environment(), facts)
            assert any(not choice["num_workers"] and not choice["pin_memory"] for choice in choices) == found


class TestCrowding:
    """Loader workers take cores that the step needs: without them compute is faster, too."""

    SHARES: ClassVar = {C.MATMUL: 0.6, C.OPTIMIZER: 0.3, C.DATA_WAIT: 0.1}

    def saved(
        self, *, busy: float | None = None, workers: int = 2, threads: int | None = None, cores: int = 2
    ) -> float:
        loading = {**WORKERS, "num_workers": workers}
        found = measured(self.SHARES, data_loading=loading, cpu_threads={"num_threads": threads, "bind": None})
        cpu = Device(kind="cpu", name="c", memory_bytes=1)
        hardware = replace(found.environment.hardware, num_cores=cores, devices=(cpu,))
        activity = None
        if busy is not None:
            activity = InputActivity(num_workers=workers, wait_ns=0, runnable_share=busy, read_bytes_per_s=0.0)
        found = dataclasses.replace(found, environment=replace(found.environment, hardware=hardware), input=activity)
        return strategy_named("dataset_cache").bound(found, {"where": "memory"})

    def test_a_cache_saves_what_its_workers_computed(self) -> None:
        assert self.saved(busy=0.1) == pytest.approx(0.1 + 2 * 0.1)
        assert self.saved() == pytest.approx(1.0), "what is not known sets no limit"

    @pytest.mark.parametrize("options", [{"workers": 0}, {"threads": 2, "cores": 4}, {"threads": 1, "cores": 3}])
    def test_nothing_is_crowded_without_workers_or_with_cores_for_all(self, options: dict[str, int]) -> None:
        assert self.saved(busy=0.1, **options) == pytest.approx(0.1)


def test_recomputation_is_half_of_a_step_at_most() -> None:
    found = measured({C.MATMUL: 1.0}, activation_checkpointing={"every": 1, "save": None})
    bound = strategy_named("activation_checkpointing").bound(found, {"every": None, "save": None})
    assert bound == pytest.approx(0.5)


def test_a_step_without_time_divides_by_nothing() -> None:
    empty = Breakdown(
        rank=0,
        device="cpu",
        num_steps=1,
        step_time_ns=0,
        categories={},
        quality=CaptureQuality(num_events=0, num_steps=1),
    )
    assert removable(situation(empty), *Category) == 0
    assert sum(breakdown_of({}).categories.values()) == STEP_NS
