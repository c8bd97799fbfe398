"""local_sgd: each rank updates its own model for several steps, then all ranks average their models (post-local SGD).

Mechanism: `warm_up_steps` ordinary steps, then each rank updates with its own gradient, and all average their models
after every `every` steps. With `inside` the ranks of a host average their gradients in every step, so that only hosts
drift apart. Momentum and other states of the optimizer stay each rank's own, and each clips by its own norm. See
`steptune.tuner.training.local_sgd`.

Helps: networks much slower than the devices: what is sent is divided by `every`. Hurts: models drift apart between
averages, and every rank updates from a smaller batch; with a large `every` the result is worse.

Numerics: `recipe`. Judged on the loss over a longer horizon that includes local steps.

Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (2018), arXiv 1808.07217;
https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, part_of, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, needs_ranks
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.local_sgd.choice import LocalSgdSetting
from steptune.tuner.strategies.local_sgd.conflicts import CONFLICTS, DROPPED

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

TRIED = (8, 4, 16)


class LocalSgd(Strategy):
    setting = LocalSgdSetting
    conflicts = CONFLICTS
    dropped = DROPPED
    summary = "local updates on each rank, with models averaged over all ranks every N steps"
    needs_workload = "the script's own loop exchanges the gradients"
    attacks = (Category.COMMUNICATION,)
    cures = (Cure.COMMUNICATE_LESS,)
    usual_realisation = 0.4

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        apart = tuple(self.completed({"every": every}) for every in TRIED)
        inside = tuple(self.completed({"every": every, "inside": True}) for every in TRIED)
        return (*inside, *apart, self.completed({"every": 1}))

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice == self.neutral(workload):
            return Supported()
        alone = needs_ranks(environment)
        if isinstance(alone, Unsupported) or choice["every"] == 1:
            return alone
        if workload.custom_step:
            return Unsupported("not supported with a custom training_step, whose updates cannot be counted")
        if not choice["inside"]:
            return Supported()
        ranks, hosts = environment.num_ranks, environment.num_hosts
        if hosts == 1:
            return Unsupported(
                "inside=True requires at least 2 hosts, got 1: averaging gradients within the only host "
                "leaves no local step"
            )
        if ranks % hosts or ranks == hosts:
            return Unsupported(
                f"requires at least 2 ranks on every host, and the same number on each: {ranks} ranks on {hosts} hosts"
            )
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.EXACT if choice["every"] == 1 else Numerics.RECIPE

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["every"] == 1:
            return
        from steptune.tuner.training.plan import LocalSgdArguments

        plan.wrap.local_sgd = LocalSgdArguments(
            every=int(choice["every"] or 1),
            warm_up_steps=int(choice["warm_up_steps"] or 0),
            inside=bool(choice["inside"]),
        )

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        return {"every": choice["every"]}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: exposed communication, less the time for averaging the models. Averaging once
        sends as many bytes as reducing the gradients of one step.
        """
        today = int(situation.choices[self.name]["every"] or 1)
        kept = today / int(choice["every"] or 1)
        return part_of(without(situation, Category.COMMUNICATION), max(0.0, 1 - kept))

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return the settings of the job's model averaging, and how often it has averaged."""
        from steptune.tuner.training import local_sgd

        found = job.hook_of(local_sgd.LocalSgd)
        if found is None:
            return {"every": 1}
        return {
            "every": found.every,
            "warm_up_steps": found.warm_up_steps,
            "inside": found.inside,
            "steps": found.num_steps,
            "averages": found.num_averages,
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        if choice["every"] == 1 or evidence.get("every") == 1:
            took = evidence.get("every") == choice["every"]
            return Effect(
                strategy=self.name, took=took, detail=f"models are averaged every {evidence.get('every')} steps"
            )
        effect = super().took_effect(evidence, choice)
        if not effect.took:
            return effect
        averages, steps = evidence.get("averages", 0), evidence.get("steps", 0)
        local = max(0, steps - int(choice["warm_up_steps"] or 0))
        return Effect(
            strategy=self.name,
            took=averages > 0,
            detail=f"{averages} averages in {local} local steps after {steps - local}",
        )
