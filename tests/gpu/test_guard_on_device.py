"""The guard on the device: recurrent layers can be judged, and faults that 16 bits hide are seen in FP32."""

from __future__ import annotations

import pytest
from guarded import BF16, FP32, PROTOCOL, Study, make_study
from guarded_trainings import FAULTS, Patches, Recurrent
from msgspec.structs import replace

O1 = {"precision": {"level": "O1", "dtype": "bfloat16"}}
HALVES = {**O1, "micro_batch": {"num_micro_batches": 2}}
TF32 = 2.0**-11


@pytest.fixture(scope="module", params=[Recurrent, Patches])
def study(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Study:
    short = replace(PROTOCOL, num_curve=8, num_horizon=0)
    return make_study(
        tmp_path_factory.mktemp("study") / "files",
        request.param,
        protocol=short,
        unit_roundoffs=(FP32, TF32, BF16),
        device="cuda",
        own_roundoff=TF32,
    )


@pytest.mark.parametrize("choices", [{}, O1, HALVES], ids=["FP32", "bf16", "bf16, micro-batches"])
def test_the_same_training_passes(study: Study, choices: dict) -> None:
    job = study.job(**choices)
    assert study.failed(job, unit_roundoff=BF16 if choices else TF32, choices=choices) == []


def test_a_gradient_that_is_10_percent_larger_is_seen_in_fp32(study: Study) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "gradient of one tensor 10 % larger")
    planted = fault.plant(study.make_workload)  # type: ignore[arg-type]
    assert planted is not None
    assert "gradients in FP32" in study.failed(study.job(planted(), **O1), unit_roundoff=BF16, choices=O1)
