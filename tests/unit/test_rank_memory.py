"""Memory that ranks hold by layout, predictions of other layouts from it, and what a search makes of that.

tests/integration/test_live_bytes.py shows that the counts are true.
"""

from __future__ import annotations

from typing import Any

import pytest
from builders import failed_result, sample_environment, sample_facts, sample_hardware, sample_result
from msgspec.structs import replace

from steptune.tuner.records import (
    BASELINE,
    Candidate,
    Choice,
    Device,
    Failure,
    FailureKind,
    MemoryPeak,
    Phase,
    StudySettings,
    TrialResult,
    UnitFacts,
)
from steptune.tuner.search.knowledge import Knowledge, Outcome
from steptune.tuner.search.memory_model import memory_model
from steptune.tuner.search.rank_memory import RankMemory, held
from steptune.tuner.search.space import Space

GB = 10**9
ELEMENTS = GB
UNITS = {"root": UnitFacts(largest=0, root=ELEMENTS), "block": UnitFacts(largest=GB // 50, root=GB // 10)}


def space(num_ranks: int = 2, num_hosts: int = 1, capacity_gb: float = 24.0, **facts: Any) -> Space:
    """A billion FP32 parameters: 4 GB, as many gradients, and 8 GB of states."""
    device = Device(kind="cuda", name="Some Device", memory_bytes=int(capacity_gb * GB) + (600 << 20))
    environment = sample_environment(
        "cuda",
        hardware=sample_hardware("cuda", devices=(device,) * num_ranks),
        num_ranks=num_ranks,
        num_hosts=num_hosts,
    )
    plain = sample_facts(**{"current": {}, "global_batch": 8, "custom_step": False, "look_peak_bytes": 0, **facts})
    model = replace(
        plain.model,
        num_parameters=ELEMENTS,
        parameter_bytes=4 * ELEMENTS,
        shard_units=UNITS,
        has_batch_statistics=False,
        num_unused_parameters=0,
    )
    optimizer = replace(plain.optimizer, state_bytes=8 * ELEMENTS, implementation="fused")
    return Space(environment, replace(plain, model=model, optimizer=optimizer), StudySettings())


def laid(mode: str, wrap: str = "root", **more: Any) -> Candidate:
    return Candidate(choices={"sharding": {"mode": mode, "wrap": wrap, **more}})


FULL = laid("full", "block")
O1: dict[str, Choice] = {"precision": {"level": "O1", "dtype": "bfloat16"}}


def always_gb(candidate: Candidate, **environment: int) -> float:
    found = held(space(**environment), candidate)
    assert found is not None
    return found.always / GB


class TestAlways:
    @pytest.mark.parametrize(
        ("candidate", "gb"),
        [
            (BASELINE, 4 + 8 + 4),  # parameters, states, buckets
            (Candidate(choices=O1), 16),
            (Candidate(choices={"precision": {"level": "O2", "dtype": "bfloat16"}}), 2 + 4 + 8 + 2),
            (Candidate(choices={"precision": {"level": "O3", "dtype": "bfloat16"}}), 2 + 4 + 2),
            (laid("zero1"), 4 + 4 + 4),
            (laid("grad_op", "block"), 6),
            (FULL, 6),
            (laid("full"), 6),
        ],
        ids=lambda value: value.label if isinstance(value, Candidate) else str(value),
    )
    def test_is_what_stays_on_each_of_two_ranks(self, candidate: Candidate, gb: float) -> None:
        assert always_gb(candidate) == gb

    def test_one_rank_has_no_buckets(self) -> None:
        assert always_gb(BASELINE, num_ranks=1) == 12

    def test_more_ranks_have_smaller_parts(self) -> None:
        assert always_gb(FULL, num_ranks=8) == 1.5

    def test_hybrid_has_the_part_of_a_host(self) -> None:
        assert always_gb(laid("hybrid", "block"), num_ranks=8, num_hosts=2) == 3

    def test_gradients_that_are_views_are_there_once(self) -> None:
        views = held(space(), Candidate(choices={"ddp_buckets": {"bucket_views": True}}))
        plain = held(space(), BASELINE)
        assert views is not None
        assert plain is not None
        assert (plain.after_backward, views.after_backward) == (4 * GB, 0)

    def test_frozen_parameters_have_no_gradients(self) -> None:
        base = space()
        model = replace(base.workload.model, num_frozen=ELEMENTS // 2)
        half = Space(base.environment, replace(base.workload, model=model), StudySettings())
        found = held(half, BASELINE)
        assert found is not None
        assert (found.always, found.after_backward) == (14 * GB, 2 * GB)

    def test_multi_tensor_updates_take_one_more_copy(self) -> None:
        plain = held(space(), BASELINE)
        foreach = held(space(), Candidate(choices={"optimizer_implementation": {"implementation": "foreach"}}))
        assert plain is not None
        assert foreach is not None
        assert foreach.at_update - plain.at_update == 4 * GB

    @pytest.mark.parametrize(
        "choices",
        [
            {"gradient_compression": {"method": "powersgd"}},
            {"optimizer_algorithm": {"algorithm": "lamb"}},
            {"optimizer_implementation": {"contiguous": True}},
            {"sharding": {"mode": "full", "wrap": "size", "min_num_params": 77}},
        ],
        ids=lambda choices: next(iter(choices)),
    )
    def test_what_is_not_counted_is_not_predicted(self, choices: dict[str, Choice]) -> None:
        assert held(space(), Candidate(choices=choices)) is None


class TestOtherLayouts:
    def memory(self) -> RankMemory:
        memory = RankMemory(space())
        memory.learn(BASELINE, 1, 4, 26 * GB)  # 16 always, so 10 of activations
        return memory

    def test_have_the_activations_of_the_one_that_was_measured(self) -> None:
        found = held(space(), FULL)
        assert found is not None
        assert self.memory().predict(FULL, 1, 4) == found.always + found.at_loss + 10 * GB
        assert self.memory().predict(BASELINE, 1, 4) == 26 * GB

    def test_have_half_of_them_with_half_of_the_samples(self) -> None:
        """Beside DDP's gradients, which micro-batches add up in."""
        assert self.memory().predict(BASELINE, 2, 2) == (16 + 4 + 5) * GB

    def test_are_not_predicted_from_other_activations(self) -> None:
        assert self.memory().predict(Candidate(choices={"activation_checkpointing": {"every": 1}}), 1, 4) is None
        assert self.memory().predict(Candidate(choices=O1), 1, 4) is None

    def test_are_not_predicted_from_a_peak_without_activations(self) -> None:
        """At 20 GB all gradients of DDP were there: how much was there before is not known."""
        memory = RankMemory(space())
        memory.learn(BASELINE, 1, 4, 20 * GB)
        assert memory.predict(FULL, 1, 4) is None

    def test_two_sizes_make_a_line(self) -> None:
        """6 GB at two samples, 10 at four: 2 GB without any, 4 at one."""
        memory = self.memory()
        memory.learn(BASELINE, 2, 2, (16 + 4 + 6) * GB)
        found = held(space(), FULL, 4)
        assert found is not None
        assert memory.predict(FULL, 4, 1) == found.always + found.at_loss + 4 * GB

    def test_copies_of_autocast_are_there_without_any_sample(self) -> None:
        memory = RankMemory(space())
        memory.learn(Candidate(choices=O1), 1, 4, 26 * GB)
        assert memory.predict(Candidate(choices=O1), 2, 2) == (16 + 4 + 2 + 4) * GB

    def test_begin_with_what_the_look_showed(self) -> None:
        memory = RankMemory(space())
        memory.look(4, 14 * GB)
        assert memory.predict(BASELINE, 1, 4) == 26 * GB


def ran(what: Candidate, peak_gb: float) -> TrialResult:
    peaks = tuple(
        MemoryPeak(rank=rank, resident_bytes=1, allocated_bytes=int(peak_gb * GB), device_bytes=1) for rank in range(2)
    )
    return sample_result(candidate=what, memory=peaks, breakdowns=(), contended=False)


def out_of_memory(what: Candidate) -> TrialResult:
    failure = Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.BUILD, message="no memory")
    return failed_result(candidate=what, failure=failure, windows=(), memory=(), breakdowns=(), guard=None)


class TestSearch:
    def test_does_not_try_what_cannot_fit_without_activations(self) -> None:
        memory = memory_model(space(capacity_gb=15), StudySettings())
        assert "20 GB on every rank even without activations, but only 15 GB" in (memory.why_not(BASELINE, 1) or "")
        assert memory.why_not(FULL, 1) is None

    def test_does_not_try_a_layout_whose_activations_do_not_fit(self) -> None:
        known = Knowledge(space(capacity_gb=18), FULL)
        known.take_in(Outcome(result=ran(FULL, 16.0)))
        assert "estimated from other layouts" in (known.will_not_fit(laid("zero1")) or "")
        assert known.will_not_fit(laid("grad_op", "block")) is None

    def test_what_ran_is_not_ruled_out(self) -> None:
        known = Knowledge(space(capacity_gb=15), FULL)
        known.take_in(Outcome(result=ran(BASELINE, 14.0)))
        assert known.will_not_fit(BASELINE) is None

    def test_looks_for_what_enables_training_among_layouts_that_fit(self) -> None:
        """In 18 GB: with all gradients on every rank it does not fit, whatever is recomputed; in parts it does."""
        study = space(capacity_gb=18, look_samples=4.0, look_peak_bytes=14 * GB)
        memory = memory_model(study, StudySettings())
        memory.take_in(out_of_memory(BASELINE), 1)
        ladder = sorted(study.memory_ladder(), key=lambda candidate: memory.may_not_fit(candidate, 1))
        assert ladder[0].choices["sharding"]["mode"] in ("grad_op", "full")
        assert memory.may_not_fit(laid("zero1"), 1)

    def test_tries_last_what_is_no_smaller_than_what_ran_out(self) -> None:
        """In 20 GB, of which parts of parameters and states take 6: at least 13.5 GB of activations did not fit."""
        memory = memory_model(space(capacity_gb=20), StudySettings())
        same = (laid("full", "block", ignored="norms"), laid("full", "block", prefetch=2), laid("grad_op", "block"))
        assert not any(memory.may_not_fit(other, 1) for other in same)
        memory.ran_out_with(FULL, 1)
        assert all(memory.may_not_fit(other, 1) for other in same)
        # Less on the device, fewer samples at a time, or other activations may fit.
        recomputed = FULL.with_choice("activation_checkpointing", {"every": 1})
        assert not memory.may_not_fit(laid("full", "block", cpu_offload=True), 1)
        assert not memory.may_not_fit(FULL, 2)
        assert not memory.may_not_fit(recomputed, 1)

    def test_rules_nothing_out_by_what_may_have_been_missing_by_little(self) -> None:
        memory = memory_model(space(capacity_gb=20), StudySettings())
        memory.ran_out_with(FULL, 1)
        assert memory.why_not(laid("full", "block", ignored="norms"), 1) is None
