"""Knobs of the workload, each as one strategy: `knobs.chunk` sets the attribute `chunk`.

They are not in `STRATEGIES`, because each workload defines its own (`workloads/knobs.py`). The effect of a knob is
unknown, so it may touch any category, and its bound is the whole step.

Numerics: `rounding` for a knob that the user declares to keep the training the same: a sum that is split differently
rounds differently, and the guard refuses larger changes. `recipe` for all other knobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, KnobFacts, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

KNOBS = "knobs"
"""Name that stands for all knobs in a list of strategies."""
PREFIX = f"{KNOBS}."


class Knob(Strategy):
    attacks = tuple(Category)
    recompiles = True
    usual_realisation = 0.05

    def __init__(self, facts: KnobFacts) -> None:
        self._facts = facts
        self.name = PREFIX + facts.name  # type: ignore[misc]
        self.summary = f"knob of the workload: its attribute {facts.name}"  # type: ignore[misc]
        self.defaults = {"value": facts.today}  # type: ignore[misc]
        self.values = {"value": (facts.today, *facts.values)}  # type: ignore[misc]
        self.has_order = facts.ordered  # type: ignore[misc]

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return tuple({"value": value} for value in self._facts.values)

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.RECIPE if self._facts.recipe else Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        plan.knobs[self._facts.name] = choice["value"]

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        return without(situation, *Category)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.workloads.knobs import is_read

        name = self._facts.name
        return {"value": getattr(job.workload, name), "read": is_read(job.workload, name)}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        effect = super().took_effect(evidence, choice)
        if not effect.took or evidence["read"]:
            return effect
        detail = (
            "the attribute is set, but no method other than __init__ seems to read it: read "
            f"self.{self._facts.name} where its value is used"
        )
        return Effect(strategy=self.name, took=True, detail=detail)


def with_knobs(strategies: Sequence[Strategy], workload: WorkloadFacts) -> tuple[Strategy, ...]:
    """Return the given strategies, and one more for each of the workload's knobs that has no strategy yet."""
    known = {strategy.name for strategy in strategies}
    return (*strategies, *(knob for facts in workload.knobs if (knob := Knob(facts)).name not in known))


def is_knob(name: str) -> bool:
    """Say whether a strategy's name is the name of a workload's knob."""
    return name.startswith(PREFIX)


def knobs_set_by(choices: Mapping[str, Choice]) -> tuple[Knob, ...]:
    """Return the knobs that these complete choices contain; only their names and values are known."""
    return tuple(
        Knob(KnobFacts(name=name.removeprefix(PREFIX), today=choice["value"], values=()))
        for name, choice in choices.items()
        if is_knob(name)
    )
