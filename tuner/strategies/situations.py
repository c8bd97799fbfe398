"""Situation of a trial, from which maximum savings, expected savings and findings are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from steptune.tuner.costs.bounds import Computation, Situation
from steptune.tuner.network.exchange import Exchange
from steptune.tuner.records import BASELINE, Choice, Environment, TrialResult, WorkloadFacts
from steptune.tuner.strategies import STRATEGIES, Strategy
from steptune.tuner.strategies.combine import complete_choices
from steptune.tuner.strategies.step_facts import step_facts


def situation_of(
    result: TrialResult, workload: WorkloadFacts, environment: Environment, choices: dict[str, Choice]
) -> Situation | None:
    """Return the situation of a trial with these complete choices; None if the trial was not profiled."""
    if not result.breakdowns:
        return None
    activity = next((w.input for w in reversed(result.clean_windows) if w.input is not None), None)
    return Situation(
        breakdown=result.breakdowns[0],
        workload=workload,
        environment=environment,
        choices=choices,
        input=activity,
        facts=step_facts(choices),
        computation=computation_of(choices),
        exchange=exchange_of(choices),
        exchange_today=exchange_of(complete_choices(BASELINE, workload)),
    )


def exchange_of(choices: Mapping[str, Choice]) -> Exchange:
    """Return what ranks exchange under these choices; missing choices get plain PyTorch's values."""
    fields: dict[str, Any] = {}
    for strategy, choice in _completed(choices):
        fields.update(strategy.exchange(choice))
    return Exchange(**fields)


def computation_of(choices: Mapping[str, Choice]) -> Computation:
    """Return how a step computes under these choices; missing choices get plain PyTorch's values."""
    fields: dict[str, Any] = {}
    for strategy, choice in _completed(choices):
        fields.update(strategy.computation(choice))
    return Computation(**fields)


def _completed(choices: Mapping[str, Choice]) -> Iterator[tuple[Strategy, Choice]]:
    for strategy in STRATEGIES:
        yield strategy, {**strategy.defaults, **choices.get(strategy.name, {})}
