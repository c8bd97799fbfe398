"""Likeness of workloads: whose answer is tried on another."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
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


def published(kind: str, batch: int, sample_bytes: int, **changes: Any) -> WorkloadFacts:
    """Facts of a published architecture, without its weights."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, f"{kind}Config")(**changes))
    types = dict(Counter(type(module).__name__ for module in model.modules()))
    found = facts(types, sum(p.numel() for p in model.parameters()), batch)
    return replace(found, dataset=replace(found.dataset, sample_bytes=sample_bytes))


def test_published_models_are_near_within_an_architecture_and_far_between_two() -> None:
    text, image = 8192, 600_000
    small = {"depths": [2, 2, 2, 2], "layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]}
    large = {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096}
    models = [
        ("GPT2", published("GPT2", 8, text)),
        ("GPT2", published("GPT2", 64, text)),
        ("GPT2", published("GPT2", 4, text, n_layer=24, n_embd=1024, n_head=16)),
        ("Llama", published("Llama", 4, text, num_hidden_layers=16, hidden_size=2048)),
        ("Bert", published("Bert", 32, text)),
        ("ViT", published("ViT", 64, image)),
        ("ViT", published("ViT", 32, image, **large)),
        ("ResNet", published("ResNet", 128, image)),
        ("ResNet", published("ResNet", 256, image, **small)),
        ("ConvNext", published("ConvNext", 64, image)),
    ]
    distances = [(one == two, far(a, b)) for (one, a), (two, b) in itertools.combinations(models, 2)]
    near, between = ([found for same, found in distances if same is wanted] for wanted in (True, False))
    assert max(near) < FARTHEST < min(between), (max(near), min(between))


def test_steps_of_which_one_was_counted_are_compared_by_size_and_batch() -> None:
    own = facts(TRANSFORMER)
    assert far(own, replace(own, model=replace(own.model, flops_per_step=None))) == 0


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
