"""Human-readable steps of a plan, in their order, each with the strategy that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

from steptune.tuner.errors import ChoiceError, PlatformError
from steptune.tuner.hardware import NO_TORCH
from steptune.tuner.records import Choice
from steptune.tuner.strategies.combine import strategies_of
from steptune.tuner.training.plan import Plan

BEFORE_TORCH = "environment variables"
STAGES = {
    "knobs": "knobs of the workload",
    "environment": "process",
    "model": "model",
    "cast": "precision of the model",
    "checkpointing": "blocks of the model",
    "block_compilation": "compilation of blocks",
    "wrap": "ranks",
    "optimizer": "optimizer",
    "step": "step",
    "whole_compilation": "compilation of the model",
    "dataset": "dataset",
    "batches": "sampling",
    "loader": "loader",
    "batch": "batch",
}
"""Stages of a plan with their displayed names, in the order in which they are carried out."""


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """Step of a plan.

    Attributes:
        stage: Stage in which it is carried out: one of `STAGES`, or before torch is imported.
        does: Human-readable action: an argument with its value, or a change of the stage's object.
        strategy: Name of the strategy that asks for it.
    """

    stage: str
    does: str
    strategy: str


def planned_steps(choices: Mapping[str, Choice]) -> tuple[PlannedStep, ...]:
    """Return the steps that complete choices ask for, in the order in which they are carried out.

    Parameters that older choices do not have are as in plain PyTorch.

    Raises:
        ChoiceError: A strategy or parameter that this version does not have.
        PlatformError: The choices have kernels, and torch is not installed.
    """
    plan = Plan()
    variables: list[PlannedStep] = []
    found: dict[str, list[PlannedStep]] = {stage: [] for stage in STAGES}
    for strategy in strategies_of(choices):
        choice = strategy.completed(choices[strategy.name])
        if unknown := choice.keys() - strategy.defaults:
            raise ChoiceError(
                f"{strategy.name} has no parameter {', '.join(sorted(unknown))} in this version of Steptune: show "
                "the plan with the version that ran the study"
            )
        for name, value in strategy.environment_variables(choice).items():
            variables.append(PlannedStep(stage=BEFORE_TORCH, does=f"{name}={value}", strategy=strategy.name))
        before = {stage: _parts(getattr(plan, stage)) for stage in STAGES}
        try:
            strategy.contribute(plan, choice)
        except ModuleNotFoundError as missing:  # kernels say by their own code what they are for
            if missing.name != "torch":
                raise
            raise PlatformError(NO_TORCH) from None
        if choice == strategy.defaults:
            continue
        asked = _differences(choice, strategy.defaults)
        for stage, title in STAGES.items():
            for does in _added(before[stage], _parts(getattr(plan, stage)), asked):
                found[stage].append(PlannedStep(stage=title, does=does, strategy=strategy.name))
    return (*variables, *(step for steps in found.values() for step in steps))


def _parts(stage: Any) -> dict[str, Any]:
    """Return a stage's requests so far, by name. Lists are copied, because strategies still add to them."""
    if is_dataclass(stage):
        values = {field.name: getattr(stage, field.name) for field in fields(stage)}
    else:
        values = stage if isinstance(stage, dict) else {"": stage}
    return {name: value.copy() if isinstance(value, (list, dict)) else value for name, value in values.items()}


def _differences(choice: Choice, defaults: Choice) -> str:
    return ", ".join(_set(name, value) for name, value in choice.items() if value != defaults[name])


def _added(before: Mapping[str, Any], after: Mapping[str, Any], asked: str) -> Iterator[str]:
    """Describe the requests added between two snapshots of a stage.

    Args:
        asked: Parameters of the choice, shown beside requests that only have a name.
    """
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, list):
            for each in value[len(old or ()) :]:
                yield f"{name}={each}" if isinstance(each, str) else _called(each, asked)
        elif isinstance(value, dict):
            yield from (_set(key, each) for key, each in value.items() if (old or {}).get(key) != each)
        elif value != old:
            yield from _set_fields(name, value)


def _set_fields(name: str, value: Any) -> Iterator[str]:
    if not is_dataclass(value):
        yield _set(name, value)
        return
    yield f"{name}: " + ", ".join(_set(field.name, getattr(value, field.name)) for field in fields(value))


def _set(name: str, value: Any) -> str:
    return f"{name}={value}"


def _called(function: Callable[..., Any], asked: str) -> str:
    """Describe a function by its name and the choice's parameters; a lambda, which has no name, by the parameters
    alone.
    """
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return asked if name == "<lambda>" else f"{name.strip('_').replace('_', ' ')} ({asked})"
