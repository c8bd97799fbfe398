"""optimizer_implementation: the same optimizer as a loop, as multi-tensor operations, or fused.

Mechanism: `for_loop` runs a dozen operators per parameter tensor; `foreach` runs each operator on all
tensors at once; `fused` runs the whole update in one kernel that reads and writes every element once.

Helps: models with many parameter tensors, and steps whose compute is short. Hurts: `foreach` holds
temporaries of the size of the parameters.

Numerics: `rounding`.

Source: https://docs.pytorch.org/docs/stable/optim.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tuner.profiling.bounds import Situation, removable
from tuner.profiling.categories import Category
from tuner.records import Choice, Effect, Environment, Numerics, Scalar, WorkloadFacts
from tuner.strategies.base import Strategy, Support, Supported, Unsupported

if TYPE_CHECKING:
    from tuner.training.job import TrainingJob
    from tuner.training.plan import Plan


class OptimizerImplementation(Strategy):
    name = "optimizer_implementation"
    summary = "for-loop, foreach or fused update"
    defaults: ClassVar[Choice] = {"implementation": None}
    values: ClassVar[Mapping[str, tuple[Scalar | range, ...]]] = {
        "implementation": (None, "for_loop", "foreach", "fused")
    }
    attacks = (Category.OPTIMIZER, Category.OPTIMIZER_HOST)
    touches = (Category.OPTIMIZER, Category.OPTIMIZER_HOST)
    usual_realisation = 0.7

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return tuple({"implementation": name} for name in ("fused", "foreach", "for_loop"))

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        wanted = choice["implementation"]
        if wanted is None:
            return Supported()
        if wanted not in workload.optimizer.implementations:
            available = ", ".join(workload.optimizer.implementations) or "none"
            return Unsupported(f"{workload.optimizer.name} has no {wanted} implementation (it has: {available})")
        if wanted == workload.optimizer.implementation:
            return Unsupported("that is what the optimizer runs today")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["implementation"] is not None:
            plan.optimizer.implementation = str(choice["implementation"])

    def bound(self, situation: Situation, choice: Choice) -> float:
        return removable(situation, Category.OPTIMIZER, Category.OPTIMIZER_HOST)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        group = job.optimizer.param_groups[0]
        name = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "for_loop"
        return {"implementation": name}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        return super().took_effect(evidence, choice if choice["implementation"] else {})
