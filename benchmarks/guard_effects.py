"""Effects of planted faults on a training in ten steps: none, immaterial or material."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from guarded import Study
from guarded_trainings import Training

from steptune.tuner.training.initial_state import build_initialised
from steptune.tuner.training.structure import map_structure
from steptune.tuner.trials.gradient_watch import set_initial_state

STEPS = 10
"""In which a material fault moves weights by more than the precision does."""
NO_EFFECT = 1e-9
"""Relative change of parameters in ten steps that exceeds what rounding in FP64 does."""

Tensors = Mapping[str, torch.Tensor]


def end_of(study: Study, workload: Training, choices: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train ten steps as the guard's candidate does; return parameters and buffers in FP64, where the device is."""
    job = study.job(workload, **choices)
    set_initial_state(job, study.files.initial_state)
    torch.manual_seed(1)
    for batch in study.batches[:STEPS]:
        job.step(map_structure(lambda leaf: leaf.clone(), batch))
    return {name: tensor.detach().double().clone() for name, tensor in job.state_dict().items()}


class PlainJob:
    """A training as one writes it down, in FP64."""

    def __init__(self, study: Study, workload: Training) -> None:
        self._workload = workload
        self.model = build_initialised(workload.model, study.files.initial_state).double().train()
        self.optimizer = workload.optimizer([(n, p) for n, p in self.model.named_parameters() if p.requires_grad])
        self.scheduler = workload.scheduler(self.optimizer)

    def loss(self, batch: Any) -> torch.Tensor:
        return self._workload.loss(self.model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        if self._workload.max_grad_norm is not None:
            clipped = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(clipped, self._workload.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def step(self, batch: Any) -> None:
        if self._workload.has_custom_step:
            self._workload.training_step(self, batch)  # type: ignore[arg-type]
            return
        self.backward(self.loss(self._workload.batch_transform(batch)))
        self.update()


def effect_of(study: Study, training: type[Training], planted: type[Training]) -> float:
    """Largest relative change of a tensor by the fault in FP64: below `NO_EFFECT` it is none."""
    plain, faulty = (_end_in_fp64(study, workload()) for workload in (training, planted))
    apart = (float((faulty[name] - value).norm() / (value.norm() + 1e-30)) for name, value in plain.items())
    return max(apart, default=0.0)


def _end_in_fp64(study: Study, workload: Training) -> dict[str, torch.Tensor]:
    job = PlainJob(study, workload)
    torch.manual_seed(1)
    for batch in study.batches[:STEPS]:
        job.step(map_structure(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf.clone(), batch))
    return {name: tensor.detach().double().clone() for name, tensor in job.model.state_dict().items()}


def rounding_of(correct: Tensors, exact: Tensors) -> dict[str, float]:
    """Norm of what a precision moves each tensor by.

    Args:
        correct: End of the training in this precision.
        exact: The same in FP32.
    """
    return {
        name: float((value - exact[name]).norm()) + 2.0**-23 * float(value.norm()) for name, value in correct.items()
    }


def moves_of(end: Tensors, correct: Tensors, rounding: Mapping[str, float]) -> float:
    """Largest over the tensors: what the fault moves it by, in units of what the precision does; above 1 the fault is
    material.
    """
    moved = 0.0
    for name, value in correct.items():
        fault = float((end[name] - value).norm()) if name in end else float("inf")
        moved = max(moved, fault / rounding[name] if rounding[name] else float("inf") if fault else 0.0)
    return moved
