"""Likeness of workloads: whose answer is tried on another."""

from typing import Any

import pytest
from builders import sample_environment, sample_facts, sample_study
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from steptune.tuner.records import Calibration, WorkloadFacts
from steptune.tuner.search.similar import FARTHEST, distance, is_alike

HERE = sample_environment()
TRANSFORMER = {"Linear": 72, "LayerNorm": 25, "Dropout": 37, "Embedding": 2, "GELU": 12}
CONVOLUTIONS = {"Conv2d": 53, "BatchNorm2d": 53, "ReLU": 49, "MaxPool2d": 1, "Linear": 1}


def facts(types: dict[str, int], parameters: float = 1e8, batch: int = 32, **changes: Any) -> WorkloadFacts:
    sample = sample_facts()
    model = replace(
        sample.model, module_types=types, num_parameters=int(parameters), flops_per_step=int(6 * parameters * batch)
    )
    return replace(sample, model=model, global_batch=batch, **changes)


def far(one: WorkloadFacts, other: WorkloadFacts, there: Any = HERE) -> float:
    return distance(one, HERE, sample_study(facts=other, environment=there))


SIZES = st.tuples(
    st.floats(1e5, 1e10), st.integers(1, 4096), st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 99))
)


@given(SIZES, SIZES)
def test_a_distance_is_one(one: Any, other: Any) -> None:
    """Nothing to itself, the same both ways, never negative."""
    a, b = (facts(types, parameters, batch) for parameters, batch, types in (one, other))
    assert far(a, a) == 0
    assert far(a, b) == pytest.approx(far(b, a))
    assert far(a, b) >= 0


@pytest.mark.parametrize(
    "other",
    [
        facts(TRANSFORMER, batch=128),
        facts({name: 2 * count for name, count in TRANSFORMER.items()}, parameters=3.5e8, batch=16),
        facts({**TRANSFORMER, "Tanh": 1}, parameters=1.1e8),
    ],
    ids=["another batch", "deeper and wider", "another head"],
)
def test_the_same_architecture_is_near_whatever_its_size(other: WorkloadFacts) -> None:
    assert far(facts(TRANSFORMER), other) < FARTHEST


@pytest.mark.parametrize(
    "other",
    [facts(CONVOLUTIONS), facts(TRANSFORMER, parameters=1e10, batch=2048)],
    ids=["other modules", "a hundred times as large on a batch as much larger"],
)
def test_another_architecture_or_scale_is_far(other: WorkloadFacts) -> None:
    assert far(facts(TRANSFORMER), other) >= FARTHEST


def test_a_device_of_another_balance_is_farther() -> None:
    slow, fast = (
        replace(HERE, calibration=Calibration(matmul_flops_per_s={"float32": flops}, copy_bytes_per_s=1e12))
        for flops in (1e13, 8e14)
    )
    own = facts(TRANSFORMER)
    there = sample_study(facts=own, environment=fast)
    assert distance(own, slow, there) > distance(own, fast, there) == 0


def test_a_study_that_examined_nothing_is_infinitely_far() -> None:
    assert far(facts(TRANSFORMER), sample_facts(), None) > 1e9


@pytest.mark.parametrize(
    ("before", "expected"),
    [({"matmul": 0.7, "data_wait": 0.3}, True), ({"matmul": 0.2, "data_wait": 0.8}, False), ({}, True)],
    ids=["alike", "waits for data", "unknown"],
)
def test_bottlenecks_are_compared_where_both_are_known(before: dict[str, float], expected: bool) -> None:
    assert is_alike({"matmul": 0.8, "elementwise": 0.1, "data_wait": 0.1}, before) is expected
