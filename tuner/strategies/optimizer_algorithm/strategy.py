"""optimizer_algorithm: replace the user's optimizer by AdamW, LAMB, LARS, Adafactor or SM3.

Mechanism: Adafactor and SM3 keep statistics of rows and columns instead of every element. LAMB and LARS scale
the update of each layer to the size of its weights, which lets larger batches train. The groups of the user's
optimizer, their weight decay and their learning rates are taken over; the rate is the workload's where
`Workload.learning_rates` names one.

Helps: memory for optimizer states; batches that the present optimizer cannot use. Hurts: the training is
another one, and its learning rate must be found again.

Numerics: `recipe`.

Sources: You et al., "LAMB" (https://arxiv.org/abs/1904.00962) and "LARS" (https://arxiv.org/abs/1708.03888);
Shazeer and Stern, "Adafactor" (https://arxiv.org/abs/1804.04235); Anil et al., "SM3"
(https://arxiv.org/abs/1901.11150); Loshchilov and Hutter, "AdamW" (https://arxiv.org/abs/1711.05101).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.optimizer_algorithm.choice import OptimizerAlgorithmSetting
from steptune.tuner.strategies.optimizer_algorithm.conflicts import CONFLICTS

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

ALGORITHMS = ("adamw", "lamb", "lars", "adafactor", "sm3")


class OptimizerAlgorithm(Strategy):
    setting = OptimizerAlgorithmSetting
    conflicts = CONFLICTS
    summary = "AdamW, LAMB, LARS, Adafactor or SM3 instead of the workload's optimizer"
    needs_workload = "the script creates its own optimizer"
    attacks = (Category.OPTIMIZER, Category.OPTIMIZER_HOST)
    touches = (Category.OPTIMIZER, Category.OPTIMIZER_HOST)
    memory = True
    usual_realisation = 0.2

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return tuple({"algorithm": name} for name in ("adafactor", "sm3", "lamb", "lars", "adamw"))

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["algorithm"] == workload.optimizer.name.lower():
            return Unsupported("already the workload's optimizer")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.RECIPE

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["algorithm"] is not None:
            plan.optimizer.algorithm = str(choice["algorithm"])

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        return without(situation, Category.OPTIMIZER, Category.OPTIMIZER_HOST)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return the algorithm that has updated the parameters, as known from the optimizer's class and state."""
        from steptune.tuner.training.optimizers.exchange import algorithm_that_ran
        from steptune.tuner.training.sharding import holder_of_states

        if job.plan.optimizer.algorithm is None:
            return {"algorithm": None}
        return {"algorithm": algorithm_that_ran(holder_of_states(job.optimizer))}
