"""How much memory a candidate will need: lines through what was measured, and what they rule out."""

from __future__ import annotations

from typing import Any

import pytest
from builders import failed_result, sample_environment, sample_facts, sample_hardware, sample_result
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from steptune.tuner.records import (
    Candidate,
    Device,
    Failure,
    FailureKind,
    MemoryPeak,
    Phase,
    StudySettings,
    TrialResult,
)
from steptune.tuner.search.knowledge import Knowledge, Outcome
from steptune.tuner.search.memory_model import CONTEXT_BYTES, MARGIN, Line, MemoryModel, fitted, memory_model, pieces_of
from steptune.tuner.search.space import Space

GB = 1e9
REST = "rest"
sizes = st.floats(1, 512)
amounts = st.floats(0, 1e11)


def model(capacity_gb: float = 10.0, known_gb: float = 2.0, per_rank: int = 64) -> MemoryModel:
    return MemoryModel(capacity_bytes=capacity_gb * GB, known_bytes=known_gb * GB, per_rank=per_rank)


class TestLine:
    @given(fixed=amounts, slope=st.floats(0, 1e9), first=sizes, second=sizes)
    def test_two_points_of_a_line_give_it_back(self, fixed: float, slope: float, first: float, second: float) -> None:
        if abs(first - second) < 1:
            return
        truth = Line(fixed=fixed, per_sample=slope)
        line = fitted([(first, truth.at(first)), (second, truth.at(second))], 0.0)
        assert line is not None
        assert line.at(100.0) == pytest.approx(truth.at(100.0), rel=1e-4, abs=1e-2 * max(1.0, fixed + slope))

    @given(st.lists(st.tuples(sizes, amounts), min_size=1, max_size=6), amounts)
    def test_more_samples_never_need_less(self, points: list[tuple[float, float]], known: float) -> None:
        line = fitted(points, known)
        assert line is None or line.per_sample >= 0

    def test_one_size_needs_to_know_what_is_fixed(self) -> None:
        assert fitted([(8.0, 4 * GB)], 0.0) is None
        assert fitted([(8.0, 4 * GB), (8.0, 5 * GB)], 0.0) is None
        assert fitted([(8.0, 4 * GB)], 2 * GB) == Line(fixed=2 * GB, per_sample=GB / 4)

    def test_no_less_is_fixed_than_is_known(self) -> None:
        line = fitted([(8.0, 4 * GB), (16.0, 8 * GB)], 1 * GB)
        assert line is not None
        assert line.fixed == 1 * GB

    def test_peaks_that_fall_with_the_batch_are_taken_as_level(self) -> None:
        """Noise, or another algorithm: nothing is promised for smaller ones."""
        assert fitted([(8.0, 4 * GB), (16.0, 3 * GB)], 0.0) == Line(fixed=3.5 * GB, per_sample=0.0)

    def test_nothing_measured_is_nothing_known(self) -> None:
        assert fitted([], GB) is None


class TestRefusal:
    def test_what_fits_with_a_margin_may_be_tried(self) -> None:
        memory = model()
        memory.learn(REST, 8, 3 * GB)
        memory.learn(REST, 16, 4 * GB)
        limit = (10 * (1 - MARGIN) - 2) / (2 / 16)
        assert memory.refusal(REST, limit - 0.1) is None
        reason = memory.refusal(REST, limit + 0.1)
        assert reason is not None
        assert "9.51 GB for micro-batches of 60.1 samples: 9.5 GB can be used" in reason

    def test_nothing_is_ruled_out_without_a_line(self) -> None:
        assert model().refusal(REST, 1e9) is None

    def test_one_size_rules_out_nothing_that_may_fit(self) -> None:
        """Gradients and workspaces may be 3.9 of the 4 GB for one sample: then 32 samples take 7.1 GB of the 10."""
        memory = model(known_gb=2.0)
        memory.learn(REST, 1, 4 * GB)
        memory.learn(REST, 1, 4.1 * GB)
        assert memory.refusal(REST, 32) is None
        assert memory.is_unlikely(REST, 32)
        memory.learn(REST, 2, 6 * GB)
        assert memory.refusal(REST, 32) is not None

    def test_what_fills_the_memory_leaves_no_room_for_more(self) -> None:
        memory = model()
        memory.learn(REST, 1, 9.6 * GB)
        assert memory.refusal(REST, 2) is not None

    def test_what_was_measured_is_not_ruled_out(self) -> None:
        """It fitted, whatever the margin says; so does less."""
        memory = model()
        memory.learn(REST, 64, 9.9 * GB)
        assert memory.refusal(REST, 64) is None
        assert memory.refusal(REST, 63) is None
        assert memory.refusal(REST, 65) is not None

    def test_where_one_ran_out_no_larger_one_fits(self) -> None:
        memory = model()
        memory.ran_out(REST, 32)
        assert memory.refusal(REST, 32) == "micro-batches of 32 samples ran out of memory"
        assert memory.refusal(REST, 64) is not None
        assert memory.refusal(REST, 16) is None

    def test_one_that_ran_out_where_it_should_have_fitted_lowers_the_capacity(self) -> None:
        memory = model()
        memory.learn(REST, 16, 4 * GB)
        memory.learn("other", 8, 3.5 * GB)
        memory.learn("other", 16, 5 * GB)
        assert memory.capacity_bytes == 10 * GB
        memory.ran_out(REST, 48)
        assert memory.capacity_bytes == 8 * GB
        assert memory.refusal("other", 32) is not None
        assert memory.refusal("other", 24) is None

    def test_lines_are_apart(self) -> None:
        memory = model()
        memory.ran_out(REST, 8)
        assert memory.refusal("checkpointed", 64) is None


# --- of a study ---------------------------------------------------------------------------------


def space(kind: str = "cuda", num_ranks: int = 1, **facts: Any) -> Space:
    device = Device(kind=kind, name="Some Device", memory_bytes=10 * 2**30)
    environment = sample_environment(
        kind, hardware=sample_hardware(kind, devices=(device,), links={}), num_ranks=num_ranks
    )
    facts = {"look_samples": 0.0, "look_peak_bytes": 0, **facts}
    plain = sample_facts(
        current={}, custom_step=False, batch_splittable=True, global_batch=64, varying_shapes=False, **facts
    )
    model_facts = replace(plain.model, has_batch_statistics=False, parameter_bytes=int(0.5 * GB))
    optimizer = replace(plain.optimizer, state_bytes=int(1 * GB))
    return Space(environment, replace(plain, model=model_facts, optimizer=optimizer), StudySettings())


def pieces(count: int) -> Candidate:
    return Candidate(choices={"micro_batch": {"num_micro_batches": count}} if count > 1 else {})


def ran(what: Candidate, peak_gb: float) -> TrialResult:
    peak = MemoryPeak(rank=0, resident_bytes=1, allocated_bytes=int(peak_gb * GB), device_bytes=int(peak_gb * GB))
    return sample_result(candidate=what, memory=(peak,), breakdowns=(), contended=False)


def out_of_memory(what: Candidate) -> TrialResult:
    failure = Failure(kind=FailureKind.OUT_OF_MEMORY, phase=Phase.WARM_UP, message="no memory")
    return failed_result(candidate=what, failure=failure, windows=(), memory=(), breakdowns=(), guard=None)


class TestStudy:
    def test_micro_batches_are_counted_on_one_rank(self) -> None:
        assert pieces_of(space(), pieces(4)) == 4
        two = memory_model(space(num_ranks=2), StudySettings())
        two.take_in(ran(pieces(2), 5.0), 2)
        two.take_in(ran(pieces(4), 4.0), 4)
        assert two.why_not(pieces(1), 1) is None
        assert two.predict(Candidate().key, 16) == pytest.approx(5.0 * GB)

    def test_the_capacity_is_the_device_s_less_its_context(self) -> None:
        assert memory_model(space(), StudySettings()).capacity_bytes == 10 * 2**30 - CONTEXT_BYTES
        limited = memory_model(space(), StudySettings(memory_limit_bytes=2**30))
        assert limited.capacity_bytes == 2**30

    def test_after_a_look_at_half_the_batch_the_whole_is_tried_last(self) -> None:
        """Before any trial: 7 GB for half of it without an optimizer's state of 1 GB; how much is fixed is unknown."""
        memory = memory_model(space(look_samples=32.0, look_peak_bytes=int(7.5 * GB)), StudySettings())
        assert memory.may_not_fit(pieces(1), 1)
        assert memory.why_not(pieces(1), 1) is None
        assert not memory.may_not_fit(pieces(2), 2)

    def test_a_look_at_the_plain_step_says_nothing_of_another_one(self) -> None:
        facts: dict[str, Any] = {"look_samples": 32.0, "look_peak_bytes": int(7.5 * GB)}
        base = space(**facts)
        changed = replace(base.workload, current={"precision": {"level": "O2"}})
        other = Space(base.environment, changed, StudySettings())
        assert memory_model(other, StudySettings()).why_not(pieces(1), 1) is None

    def test_on_a_cpu_two_sizes_are_needed(self) -> None:
        memory = memory_model(space("cpu"), StudySettings(memory_limit_bytes=int(10 * GB)))
        memory.take_in(ran(pieces(4), 8.0), 4)
        assert memory.why_not(pieces(1), 1) is None
        memory.take_in(ran(pieces(2), 9.0), 2)
        assert memory.why_not(pieces(1), 1) is not None


class TestSearch:
    def test_a_candidate_that_will_not_fit_is_known_to_fail_and_the_reason_is_told(self) -> None:
        known = Knowledge(space(), pieces(4))
        known.take_in(Outcome(result=ran(pieces(4), 4.5)))
        known.take_in(Outcome(result=ran(pieces(2), 7.0)))
        assert known.known_to_fail(pieces(1))
        assert "would need about 12 GB" in (known.will_not_fit(pieces(1)) or "")
        assert not known.known_to_fail(pieces(8))

    def test_a_trial_that_ran_out_feeds_it(self) -> None:
        known = Knowledge(space(), pieces(4))
        known.take_in(Outcome(result=ran(pieces(4), 3.0)))
        assert not known.known_to_fail(pieces(1))
        known.take_in(Outcome(result=out_of_memory(pieces(2))))
        assert known.known_to_fail(pieces(1))

    def test_what_ran_is_not_ruled_out_by_a_line(self) -> None:
        known = Knowledge(space(), pieces(4))
        known.take_in(Outcome(result=ran(pieces(1), 9.9)))
        known.take_in(Outcome(result=out_of_memory(pieces(2))))
        assert known.will_not_fit(pieces(1)) is None

    def test_other_choices_are_on_another_line(self) -> None:
        known = Knowledge(space(), pieces(4))
        known.take_in(Outcome(result=out_of_memory(pieces(1))))
        checkpointed = pieces(1).with_choice("activation_checkpointing", {"every": 1})
        assert known.will_not_fit(checkpointed) is None
