"""Combination of choices by the rules that each strategy lists; this module names no strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from steptune.tuner.records import Candidate, Choice, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies import STRATEGIES, Strategy, strategy_named
from steptune.tuner.strategies.api import TF32_ROUNDOFF, Conflict, Dropped, Settings, Together
from steptune.tuner.strategies.knobs import knobs_set_by, with_knobs

if TYPE_CHECKING:
    from steptune.tuner.training.plan import Plan

Choices = Mapping[str, Choice]


RECURRENT = ("RNN", "LSTM", "GRU")
"""Recurrent modules, which cuDNN by default computes in TF32, like convolutions."""
CONFLICTS: tuple[Conflict, ...] = tuple(row for strategy in STRATEGIES for row in strategy.conflicts)
DROPPED: tuple[Dropped, ...] = tuple(row for strategy in STRATEGIES for row in strategy.dropped)
TOGETHER: tuple[Together, ...] = tuple(row for strategy in STRATEGIES for row in strategy.together)
_REGISTERED = frozenset(STRATEGIES)


def complete_choices(
    candidate: Candidate, workload: WorkloadFacts, strategies: Sequence[Strategy] = STRATEGIES
) -> dict[str, Choice]:
    """Return the complete choice of every strategy, and of every knob of the workload."""
    every = with_knobs(strategies, workload)
    return {s.name: s.complete(candidate.choices.get(s.name, {}), workload) for s in every}


def normalise(candidate: Candidate, workload: WorkloadFacts, strategies: Sequence[Strategy] = STRATEGIES) -> Candidate:
    """Drop choices that equal the current setting, and those that have no meaning in the combination.

    Raises:
        ChoiceError: A strategy or parameter that does not exist.
    """
    strategies = with_knobs(strategies, workload)
    for name, choice in candidate.choices.items():
        strategy_named(name, strategies).check(choice)
    complete = complete_choices(candidate, workload, strategies)
    settings = Settings(complete)
    for row in (*DROPPED, *(row for strategy in _unregistered(strategies) for row in strategy.dropped)):
        name = row.setting.strategy
        if name in complete and row.when(settings):
            neutral = strategy_named(name, strategies).neutral(workload)
            complete[name] = {p: neutral[p] if p in row.parameters else value for p, value in complete[name].items()}
            settings = Settings(complete)
    differences = {s.name: s.difference(complete[s.name], workload) for s in strategies}
    return Candidate(choices={name: choice for name, choice in differences.items() if choice})


def conflict(
    candidate: Candidate,
    environment: Environment,
    workload: WorkloadFacts,
    strategies: Sequence[Strategy] = STRATEGIES,
) -> str | None:
    """Return the reason why a candidate's combination cannot be run, or None."""
    complete = complete_choices(candidate, workload, strategies)
    settings = Settings(complete)
    for row in (*CONFLICTS, *(row for strategy in _unregistered(strategies) for row in strategy.conflicts)):
        if complete.keys() >= set(row.strategies) and row.when(settings, environment, workload):
            return f"{' with '.join(row.strategies)}: {row.reason}{row.detail(workload)}"
    return None


def _unregistered(strategies: Sequence[Strategy]) -> Iterator[Strategy]:
    return (strategy for strategy in strategies if strategy not in _REGISTERED)


def strategies_of(choices: Choices) -> tuple[Strategy, ...]:
    """Return the strategies and knobs of complete choices, in the order in which they change a plan.

    A strategy that the choices do not name is left out: its package may be installed only here.

    Raises:
        ChoiceError: A strategy that this installation does not have: a trial would silently go without it.
    """
    here = (*STRATEGIES, *knobs_set_by(choices))
    for name in choices:
        strategy_named(name, here)
    return tuple(strategy for strategy in here if strategy.name in choices)


def make_plan(choices: Choices) -> Plan:
    """Make the plan that the strategies ask for, in their order."""
    from steptune.tuner.training.plan import Plan

    plan = Plan()
    for strategy in strategies_of(choices):
        strategy.contribute(plan, choices[strategy.name])
    return plan


def environment_variables(choices: Choices, strategies: Sequence[Strategy] = STRATEGIES) -> dict[str, str]:
    """Return the environment variables that must be set before torch is imported."""
    variables: dict[str, str] = {}
    for strategy in strategies:
        variables.update(strategy.environment_variables(choices[strategy.name]))
    return variables


def numerics_of(candidate: Candidate, workload: WorkloadFacts, strategies: Sequence[Strategy] = STRATEGIES) -> Numerics:
    """Return the effect on numerics of a candidate: the strongest among its choices."""
    worst = Numerics.EXACT
    strategies = with_knobs(strategies, workload)
    for name, choice in candidate.choices.items():
        strategy = strategy_named(name, strategies)
        worst = max(worst, strategy.numerics(strategy.complete(choice, workload)), key=lambda n: n.rank)
    return worst


def unit_roundoff_of(
    candidate: Candidate,
    environment: Environment,
    workload: WorkloadFacts,
    strategies: Sequence[Strategy] = STRATEGIES,
) -> float:
    """Return the unit roundoff of the coarsest arithmetic with which a candidate computes, including the baseline's
    own.

    FP32 convolutions and recurrent layers on CUDA use TF32 unless told otherwise:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    complete = complete_choices(candidate, workload, strategies)
    uses_cudnn = any(("Conv" in name and name != "Conv1D") or name in RECURRENT for name in workload.model.module_types)
    default = TF32_ROUNDOFF if environment.hardware.device_kind == "cuda" and uses_cudnn else 0.0
    return max(default, *(strategy.unit_roundoff(complete[strategy.name]) for strategy in strategies))
