"""larger_global_batch: several of today's batches merged into one, up to the user's limit.

Mechanism: what is paid once a step (launches, the optimizer, the reduction of gradients) is shared by more samples.
In the simplest model a step takes a + b * n for n samples, so the rate approaches 1 / b. Rates are compared in samples
or tokens per second. The learning rate of every group is multiplied by the factor (`linear`: Goyal et al., for SGD)
or its root (`sqrt`: Malladi et al., for optimizers that divide by a root of squared gradients), or kept (`none`). A
scheduler counts updates, of which an epoch has fewer.

Helps: steps with a large fixed part, and devices that small batches leave idle. Hurts: beyond some size a larger
batch needs more samples for the same loss; memory grows.

Numerics: `recipe`.

Sources: Goyal et al., "Accurate, Large Minibatch SGD" (https://arxiv.org/abs/1706.02677); Malladi et al., "On the SDEs
and Scaling Rules for Adaptive Gradient Algorithms" (https://arxiv.org/abs/2205.10287).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, at_roofline, jointly, part_of, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.larger_global_batch.choice import LargerGlobalBatchSetting
from steptune.tuner.strategies.larger_global_batch.conflicts import DROPPED, TOGETHER

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

MAX_FACTOR = 1024
FACTORS = (2, 4, 8, 16, 32, 64)
LINEAR = ("SGD",)
"""Optimizers with an update proportional to the gradient."""

PER_STEP = (
    Category.OPTIMIZER,
    Category.OPTIMIZER_HOST,
    Category.COMMUNICATION,
    Category.HOST,
    Category.LAUNCH_LATENCY,
    Category.DISPATCH,
    Category.SYNCHRONISATION,
    Category.ALLOCATION,
)


class LargerGlobalBatch(Strategy):
    setting = LargerGlobalBatchSetting
    dropped = DROPPED
    together = TOGETHER
    summary = "larger global batch, up to Workload.max_global_batch"
    needs_workload = "the script's own loop sets the number of samples per step"
    attacks = PER_STEP
    recompiles = True
    usual_realisation = 0.4

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        limit = workload.max_global_batch or workload.global_batch
        allowed = [factor for factor in FACTORS if factor * workload.global_batch <= limit]
        largest = min(MAX_FACTOR, limit // workload.global_batch)
        if largest > 1 and largest not in allowed:
            allowed.append(largest)
        rule = "linear" if workload.optimizer.name in LINEAR else "sqrt"
        return tuple({"factor": factor, "rule": rule} for factor in allowed or FACTORS[:1])

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        factor = int(choice["factor"] or 1)
        if factor == 1:
            return Supported()
        limit, wanted = workload.max_global_batch, factor * workload.global_batch
        if limit is None:
            return Unsupported("requires Workload.max_global_batch: set it to the largest global batch that you accept")
        if wanted > limit:
            return Unsupported(f"a global batch of {wanted} exceeds Workload.max_global_batch ({limit})")
        length = workload.dataset.length
        if length is not None and length < wanted:
            return Unsupported(f"the dataset has only {length} samples; the batch needs {wanted}")
        if workload.dataset.kind == "iterable" and (workload.varying_shapes or not workload.batch_splittable):
            return Unsupported("the guard cannot concatenate batches of this iterable dataset")
        if workload.custom_step:
            return Unsupported("not supported with a custom training_step, which may rely on its batch size")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.RECIPE

    def contribute(self, plan: Plan, choice: Choice) -> None:
        factor = int(choice["factor"] or 1)
        plan.batches.factor = factor
        plan.optimizer.rate_factor = {"linear": float(factor), "sqrt": factor**0.5, "none": 1.0}[str(choice["rule"])]

    def computation(self, choice: Choice) -> Mapping[str, Any]:
        return {"factor": int(choice["factor"] or 1)}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings of a step with n times the samples: 1 - 1/n of the time that is spent once per
        step, and of the compute time above the roofline. Such a step takes at least as long as a step today.
        """
        more = int(choice["factor"] or 1) / int(situation.choices[self.name]["factor"] or 1)
        if more <= 1:
            return {}
        return part_of(jointly(at_roofline(situation), without(situation, *PER_STEP)), 1 - 1 / more)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return the number of samples of a step, and the optimizer's learning rates relative to the user's. The rates
        are missing if a scheduler does not report the initial ones.
        """
        found: dict[str, Any] = {"taken": job.samples_per_step, "drawn": job.samples_drawn}
        found["today"] = job.workload.global_batch
        if found["taken"] is None and found["drawn"] is None:
            return {}
        factor = job.plan.batches.factor
        rates = job.rate_factors
        if rates is not None:
            rules = {"none": 1.0, "sqrt": math.sqrt(factor), "linear": float(factor)}
            fitting = (name for name in ("linear", "none", "sqrt") if all(math.isclose(r, rules[name]) for r in rates))
            found["rule"] = next(fitting, f"times {', '.join(f'{rate:g}' for rate in sorted(set(rates)))}")
        return found

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        effect = super().took_effect(evidence, choice)
        if not effect.took or choice["factor"] == 1:
            return effect
        seen, wanted = _samples_of(evidence), int(choice["factor"] or 1) * evidence.get("today", 0)
        took = seen is not None and seen == wanted
        found = "no step was observed" if seen is None else f"a step processed {seen} samples"
        return Effect(strategy=self.name, took=took, detail=found if took else f"{found}; expected {wanted} samples")


def _samples_of(evidence: Mapping[str, Any]) -> int | None:
    """Return the number of samples of a step: the length of its batches, or, if that counts something else such as
    tokens, the number that the loader drew.
    """
    taken, drawn = evidence.get("taken"), evidence.get("drawn")
    counts_samples = taken is not None and (drawn is None or taken in (drawn, evidence["today"]))
    return taken if counts_samples else drawn
