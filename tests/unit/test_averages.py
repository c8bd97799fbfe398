"""Averages of weights: their recurrence is found in the reference, and replayed with the candidate's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import BF16, FP32, PROTOCOL, make_study
from guarded_unseen import UNSEEN, Pair
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from steptune.tuner.guard.averages import LIMIT, Average, StateStep, find_averages, worst_average

EPS = 2.0**-23
O1 = {"precision": {"level": "O1", "dtype": "bfloat16"}}


def steps(shares: list[float], *, seed: int = 0, size: int = 40, drift: float = 1e-3) -> list[StateStep]:
    """Steps of an average that takes `shares` of a weight, in FP32, beside a weight that it does not average."""
    drawn = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, generator=drawn)
    average, found = weight.clone(), []
    for share in shares:
        weight = weight + drift * torch.randn(size, generator=drawn)
        before, average = average, average.lerp(weight, share)
        found.append(
            StateStep(
                before={"average": before.double()},
                after={"average": average.double()},
                weights={"weight": weight.double(), "other": torch.randn(size, generator=drawn).double()},
                roundoffs=dict.fromkeys(("average", "weight", "other"), EPS),
            )
        )
    return found


@given(share=st.floats(0.001, 1.0), seed=st.integers(0, 20))
def test_an_average_is_found_and_passes_with_other_weights(share: float, seed: int) -> None:
    (found,) = find_averages(steps([share] * 3, seed=seed))
    assert found.weight == "weight"
    assert found.shares == pytest.approx([share] * 3, rel=1e-2)
    exact = Average(name="average", weight="weight", shares=(share,) * 3)
    assert worst_average([exact], steps([share] * 3, seed=seed + 100)).score < LIMIT


@pytest.mark.parametrize("wrong", [[0.011, 0.011], [0.01, 0.0], [0.01, 0.02]], ids=["share", "stopped", "second step"])
def test_another_recurrence_is_told(wrong: list[float]) -> None:
    average = Average(name="average", weight="weight", shares=(0.01, 0.01))
    found = worst_average([average], steps(wrong, drift=0.1))
    assert found.score > LIMIT
    assert found.wanted == 0.01


def test_shares_may_grow_from_step_to_step() -> None:
    (found,) = find_averages(steps([0.1, 0.2, 0.3], drift=0.1))
    assert found.shares == pytest.approx((0.1, 0.2, 0.3), rel=1e-3)


def test_what_stays_or_has_few_elements_is_no_average() -> None:
    assert find_averages(steps([0.0, 0.0])) == ()
    assert find_averages(steps([0.1, 0.1], size=4)) == ()


def test_a_buffer_that_the_candidate_has_not_is_told() -> None:
    average = Average(name="missing", weight="weight", shares=(0.1,))
    assert worst_average([average], steps([0.1])).score == float("inf")


@pytest.mark.parametrize("fault", [fault for fault in UNSEEN[Pair] if fault.part == "state"], ids=lambda f: f.name)
def test_a_wrong_average_does_not_hide_behind_16_bits(tmp_path: Path, fault: object) -> None:
    """Their noise is that of the weights, which an optimizer moves by full steps however small the gradient is."""
    short = replace(PROTOCOL, num_pointwise=4, num_curve=0, num_horizon=0, randomness="none")
    study = make_study(tmp_path / "study", Pair, protocol=short, choices=O1, unit_roundoffs=(BF16,))
    assert len(study.reference.averages) == 4
    planted = fault.plant(Pair)  # type: ignore[attr-defined]
    assert study.failed(study.job(**O1), unit_roundoff=BF16) == []
    assert "averages" in study.failed(study.job(planted(), **O1), unit_roundoff=BF16)


class Warming(Pair):
    """Averages whose share falls with the steps that they have seen: a warm-up that a number in Python counts."""

    num_seen = 0

    @property
    def decay(self) -> float:  # type: ignore[override]
        return (1 + self.num_seen) / (10 + self.num_seen)

    def training_step(self, job: Any, batch: Any) -> torch.Tensor:
        loss = super().training_step(job, batch)
        self.num_seen += 1
        return loss


def test_a_warm_up_is_judged_at_the_reference_s_steps_where_lossy_candidates_are_allowed(tmp_path: Path) -> None:
    """The reference's longer horizon is no part of what other candidates run."""
    long = replace(PROTOCOL, num_pointwise=4, num_curve=0, num_horizon=20, randomness="none")
    study = make_study(tmp_path / "study", Warming, protocol=long, unit_roundoffs=(FP32,))
    assert len(study.reference.averages) == 4
    assert study.failed(study.job()) == []
    assert len(study.reference.horizon_ends) == 3
    assert study.failed(study.job(), lossy=True) == []
