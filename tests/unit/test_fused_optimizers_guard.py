"""The guard and the kernels of LAMB and LARS: their update passes as the optimizer's own, and no other update does."""

import os
from typing import Any, ClassVar

import pytest
import torch
from guarded import PROTOCOL, Guarded, Study, make_study
from msgspec.structs import replace

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="kernels need triton")

from steptune.kernels.applying import used_kernels
from steptune.tuner.training.optimizers.lamb import Lamb
from steptune.tuner.training.optimizers.lars import Lars

POINTWISE = replace(PROTOCOL, num_pointwise=3, num_curve=0, num_horizon=0, randomness="none")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class ByLamb(Guarded):
    dropout = 0.0
    kind: ClassVar[type[torch.optim.Optimizer]] = Lamb
    options: ClassVar[dict[str, Any]] = {"lr": 1e-2, "weight_decay": 0.1}

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return self.kind([p for _, p in named_parameters], **self.options)


class ByLars(ByLamb):
    kind = Lars
    options: ClassVar = {"lr": 1.0, "weight_decay": 0.1, "momentum": 0.9, "trust": 0.02}


TRAININGS = {"lamb": ByLamb, "lars": ByLars}
FAULTS = {
    "lamb": ({"lr": 1.01e-2}, {"weight_decay": 0.0}, {"betas": (0.89, 0.999)}, {"exclude_vectors": False}),
    "lars": ({"lr": 1.01}, {"weight_decay": 0.0}, {"momentum": 0.89}, {"exclude_vectors": False}),
}


@pytest.fixture(scope="module", params=TRAININGS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def study(name: str, tmp_path_factory: pytest.TempPathFactory) -> Study:
    directory = tmp_path_factory.mktemp(name) / "study"
    return make_study(directory, TRAININGS[name], protocol=POINTWISE, device=DEVICE)


def test_the_update_by_the_kernel_passes(study: Study, name: str) -> None:
    job = study.job(fused_kernels={name: True})
    assert name in used_kernels(job.model, job.optimizer)
    assert study.failed(job) == []


@pytest.mark.parametrize("number", range(4))
def test_another_update_by_the_kernel_is_rejected(study: Study, name: str, number: int) -> None:
    training = TRAININGS[name]
    other = type("Other", (training,), {"options": {**training.options, **FAULTS[name][number]}})
    job = study.job(other(), fused_kernels={name: True})
    assert name in used_kernels(job.model, job.optimizer)
    assert study.failed(job) != []
