"""Steps of a workload's own: nothing but updates may change weights, except where today's settings do so as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import BF16, FP32, PROTOCOL, Study, make_study
from guarded_updates import ByAdamW, BySGD
from msgspec.structs import replace

BETWEEN = "weights between updates"
SHORT = replace(PROTOCOL, num_pointwise=4, num_curve=0, num_horizon=0, randomness="none", num_disturbed=1)
LOW = {"precision": {"level": "O1", "dtype": "bfloat16"}}


class OwnStep(ByAdamW):
    """Its step may shrink weights behind the update, or cut them off."""

    shrinks = 0.0
    bound = 0.0

    def training_step(self, job: Any, batch: Any) -> torch.Tensor:
        loss = job.loss(batch)
        job.backward(loss)
        job.update()
        with torch.no_grad():
            for parameter in job.model.parameters():
                if self.shrinks and parameter.dim() > 1:
                    parameter.mul_(1 - self.shrinks)
                if self.bound:
                    parameter.clamp_(-self.bound, self.bound)
        return loss  # type: ignore[no-any-return]


class Bounded(OwnStep):
    """Its bound cuts off a part of every tensor after every update."""

    bound = 0.05


class Shrinking(OwnStep):
    """Weights shrink by much less than the precision of bfloat16, and no decay of its optimizer says so."""

    shrinks = 1e-4


class Unbounded(Bounded):
    bound = 0.0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("own") / "study", OwnStep, protocol=SHORT)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return make_study(tmp_path_factory.mktemp("bounded") / "study", Bounded, protocol=SHORT)


@pytest.mark.parametrize("precision", [{}, LOW], ids=["fp32", "bf16"])
def test_a_change_behind_an_update_is_rejected(plain: Study, precision: dict[str, Any]) -> None:
    unit = BF16 if precision else FP32
    assert BETWEEN in plain.failed(plain.job(Shrinking(), **precision), unit_roundoff=unit)
    assert BETWEEN not in plain.failed(plain.job(**precision), unit_roundoff=unit)


@pytest.mark.parametrize("precision", [{}, LOW], ids=["fp32", "bf16"])
def test_a_step_that_changes_weights_itself_passes_and_must_go_on_to(bounded: Study, precision: dict[str, Any]) -> None:
    unit = BF16 if precision else FP32
    assert BETWEEN not in bounded.checks(bounded.job(**precision), unit_roundoff=unit)
    assert BETWEEN in bounded.failed(bounded.job(Unbounded(), **precision), unit_roundoff=unit)


def test_a_step_of_a_jobs_own_has_no_space_between_updates(tmp_path: Path) -> None:
    study = make_study(tmp_path / "study", BySGD, protocol=SHORT)
    assert study.reference.moves is None
    assert BETWEEN not in study.checks(study.job())
