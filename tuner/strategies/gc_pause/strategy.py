"""gc_pause: Python's garbage collection is off while training runs.

Mechanism: a collection stops the thread that launches operations. Helps: launch-bound steps that make many objects.
Hurts: reference cycles keep their memory.

Numerics: `exact`.

Sources: https://docs.python.org/3/library/gc.html
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy
from steptune.tuner.strategies.gc_pause.choice import GcPauseSetting

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan


class GcPause(Strategy):
    setting = GcPauseSetting
    summary = "Python's garbage collection off while training runs"
    attacks = (Category.HOST,)
    usual_realisation = 0.05
    needs_workload = "a loop of your own can call gc.disable() itself"

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return ({"paused": True},)

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.EXACT

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["paused"]:
            plan.environment.append(gc.disable)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        return without(situation, Category.HOST)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        return {"paused": not gc.isenabled()}
