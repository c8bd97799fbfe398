"""Trainings whose update is right, and the same with one thing wrong with it, for tests and the guard's benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from guarded import Guarded
from torch.optim.lr_scheduler import LambdaLR

WARM_UP = 20
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": {"level": "O1", "dtype": "bfloat16"}},
    "O2": {"precision": {"level": "O2", "dtype": "bfloat16"}},
    "fp16": {"precision": {"level": "O1", "dtype": "float16"}},
}


class Updated(Guarded):
    """Without dropout; a subclass says which optimizer and what is wrong with it.

    Attributes:
        kind: Class of torch.optim.
        options: Of it.
        warm_up: The learning rate grows over the first steps.
        steps_schedule: Whether the schedule is stepped; a number steps it so often.
        left_out: Parameters that begin so are not updated.
        forgets: The optimizer's state is cleared after every step.
    """

    dropout = 0.0
    kind: ClassVar[Any]
    options: ClassVar[dict[str, Any]]
    warm_up = False
    steps_schedule: ClassVar[int] = 1
    left_out: ClassVar[str | None] = None
    forgets = False

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        kept = [p for name, p in named_parameters if self.left_out is None or not name.startswith(self.left_out)]
        optimizer = self.kind(kept, **self.options)
        if self.forgets:
            optimizer.register_step_post_hook(lambda *_: optimizer.state.clear())
        return optimizer

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self.warm_up:
            return None
        return LambdaLR(optimizer, lambda step: min(1.0, (1 + step * self.steps_schedule) / WARM_UP))


class BySGD(Updated):
    kind = torch.optim.SGD
    options: ClassVar = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


class WarmSGD(BySGD):
    warm_up = True
    max_grad_norm = None


class ByAdamW(Updated):
    kind = torch.optim.AdamW
    options: ClassVar = {"lr": 1e-3, "weight_decay": 0.05}


class WarmAdamW(ByAdamW):
    warm_up = True


class ByRMSprop(Updated):
    kind = torch.optim.RMSprop
    options: ClassVar = {"lr": 1e-3, "weight_decay": 1e-2, "momentum": 0.5}


TRAININGS: tuple[type[Updated], ...] = (BySGD, WarmSGD, ByAdamW, WarmAdamW, ByRMSprop)


def with_options(**changed: Callable[[float], Any]) -> Callable[[type[Updated]], type[Updated] | None]:
    """A fault that changes options where the optimizer has them."""

    def plant(training: type[Updated]) -> type[Updated] | None:
        if not set(changed) <= set(training.options) | {"betas"}:
            return None
        if "betas" in changed and "betas" not in training.kind([torch.zeros(1)], lr=1.0).defaults:
            return None
        options = {name: change(training.options.get(name)) for name, change in changed.items()}  # type: ignore[arg-type]
        return _altered(training, options={**training.options, **options})

    return plant


def _altered(training: type[Updated], **attributes: Any) -> type[Updated]:
    return type(f"Faulty{training.__name__}", (training,), attributes)


def _of_clipping(norm: float | None) -> Callable[[type[Updated]], type[Updated] | None]:
    return lambda training: _altered(training, max_grad_norm=norm) if training.max_grad_norm is not None else None


def _of_schedule(steps: int) -> Callable[[type[Updated]], type[Updated] | None]:
    return lambda training: _altered(training, steps_schedule=steps) if training.warm_up else None


FAULTS: dict[str, Callable[[type[Updated]], type[Updated] | None]] = {
    "rate 10 % too high": with_options(lr=lambda lr: 1.1 * lr),
    "rate 1 % too low": with_options(lr=lambda lr: 0.99 * lr),
    "no weight decay": with_options(weight_decay=lambda decay: 0.0),
    "weight decay doubled": with_options(weight_decay=lambda decay: 2 * decay),
    "momentum 0.85": with_options(momentum=lambda momentum: 0.85),
    "beta2 0.99": with_options(betas=lambda betas: (0.9, 0.99)),
    "beta1 0.8": with_options(betas=lambda betas: (0.8, 0.999)),
    "not clipped": _of_clipping(None),
    "clipped to half": _of_clipping(0.25),
    "schedule never stepped": _of_schedule(0),
    "schedule stepped twice": _of_schedule(2),
    "a layer left out": lambda training: _altered(training, left_out="4."),
    "a bias left out": lambda training: _altered(training, left_out="0.bias"),
    "state lost at every step": lambda training: _altered(training, forgets=True),
}
"""Functions that make the faulty training of a training, by name; None where it means nothing there."""
