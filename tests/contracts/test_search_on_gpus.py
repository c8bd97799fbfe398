"""Five and a half minutes on a GPU, as a model: as fast as what an expert would set by hand, and nothing wasted."""

from __future__ import annotations

import math

import pytest
from gpu_model import Step, by_hand, searched
from gpu_steps import CAUSAL, CONVOLUTIONS, LANGUAGE_MODEL, VISION, WINDOWS

from steptune.tuner.records import Choice, Numerics

BUDGET_S = 330.0
O1: Choice = {"level": "O1", "dtype": "bfloat16"}
FUSED: Choice = {"implementation": "fused"}
GRAPHS: Choice = {"mode": "reduce-overhead"}

EXPERT: dict[str, tuple[Step, dict[str, Choice]]] = {
    "language model": (LANGUAGE_MODEL, {"precision": O1, "optimizer_implementation": FUSED, "compile": GRAPHS}),
    "causal model": (
        CAUSAL,
        {
            "precision": O1,
            "optimizer_implementation": FUSED,
            "attention_mask": {"is_causal": True},
            "compile": {"mode": "default"},
            "cuda_graph": {"scope": "step"},
        },
    ),
    "convolutions": (
        CONVOLUTIONS,
        {
            "precision": O1,
            "optimizer_implementation": FUSED,
            "compile": GRAPHS,
            "memory_format": {"layout": "channels_last"},
        },
    ),
    "windows": (WINDOWS, {"precision": O1, "optimizer_implementation": FUSED, "compile": {"mode": "default"}}),
    "vision": (VISION, {"precision": O1, "optimizer_implementation": FUSED, "compile": {"mode": "default"}}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", EXPERT)
def test_finds_within_minutes_what_an_expert_sets_by_hand(name: str, seed: int) -> None:
    step, choices = EXPERT[name]
    answer, runner, driver = searched(step, budget_s=BUDGET_S, seed=seed)
    found = by_hand(step, driver, **answer.candidate.choices)
    assert found <= 1.03 * by_hand(step, driver, **choices), answer.candidate.label
    assert runner.now_s <= 1.05 * BUDGET_S
    low, high = math.log(answer.gain.interval.low), math.log(answer.gain.interval.high)
    # Of eight intervals of 95 % one may miss; twice as wide, none does.
    assert abs(math.log(by_hand(step, driver) / found) - (low + high) / 2) < high - low


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("name", "start_s", "share"),
    [("language model", 20, 0.97), ("vision", 20, 0.97), ("vision", 35, 0.95), ("convolutions", 35, 0.6)],
)
def test_slow_starts_are_spent_on_what_gains_most(name: str, start_s: float, share: float, seed: int) -> None:
    """Six minutes are ten starts of 35 s: neither on a third baseline nor on what an accepted recipe does not need."""
    step, choices = EXPERT[name]
    answer, runner, driver = searched(step, budget_s=360.0, seed=seed, start_s=start_s)
    assert by_hand(step, driver, **choices) >= share * by_hand(step, driver, **answer.candidate.choices)
    block_s = 2 * (start_s + 8)
    assert runner.now_s <= 360.0 + block_s


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["causal model", "convolutions", "vision"])
def test_with_less_precision_allowed_it_is_as_fast_as_the_better_of_both(name: str, seed: int) -> None:
    """Nearly: within 8 %, where without that consent 3 % is asked for."""
    step, choices = EXPERT[name]
    answer, _, driver = searched(step, budget_s=BUDGET_S, seed=seed, allow=(Numerics.LOSSY,))
    found = by_hand(step, driver, **answer.candidate.choices)
    pure = {**choices, "precision": {"level": "O3", "dtype": "bfloat16"}}
    assert found <= 1.08 * min(by_hand(step, driver, **choices), by_hand(step, driver, **pure)), answer.candidate.label


def test_a_step_that_reads_from_the_device_is_not_recorded_eagerly() -> None:
    _, runner, _ = searched(LANGUAGE_MODEL, budget_s=BUDGET_S)
    recorded = [label for label in runner.labels if "cuda_graph" in label]
    assert all("compile: mode=default;" in label for label in recorded)


def test_nothing_is_expected_of_a_loop_over_parameters_and_of_another_sixteen_bits() -> None:
    """With everything else still to be tried."""
    _, runner, _ = searched(VISION, budget_s=200.0)
    assert not any("for_loop" in label or "float16" in label.replace("bfloat16", "") for label in runner.labels)
