"""Situation of a trial, as bounds, expectations and findings see it."""

from __future__ import annotations

from collections.abc import Mapping

from steptune.tuner.costs.bounds import Situation
from steptune.tuner.network.exchange import Exchange
from steptune.tuner.records import BASELINE, Choice, Environment, TrialResult, WorkloadFacts
from steptune.tuner.strategies import STRATEGIES
from steptune.tuner.strategies.combine import complete_choices
from steptune.tuner.strategies.step_facts import step_facts


def situation_of(
    result: TrialResult, workload: WorkloadFacts, environment: Environment, choices: dict[str, Choice]
) -> Situation | None:
    """Situation of a trial with these complete choices; None where it was not profiled."""
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
        exchange=exchange_of(choices),
        exchange_today=exchange_of(complete_choices(BASELINE, workload)),
    )


def exchange_of(choices: Mapping[str, Choice]) -> Exchange:
    """Exchange of ranks with these choices, completed by plain PyTorch's."""
    asked: dict[str, object] = {}
    for strategy in STRATEGIES:
        asked.update(strategy.exchange({**strategy.defaults, **choices.get(strategy.name, {})}))
    return Exchange(**asked)  # type: ignore[arg-type]
