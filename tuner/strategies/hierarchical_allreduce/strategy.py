"""hierarchical_allreduce: reduce gradients inside every host, then between hosts.

Mechanism: a communication hook of DDP scatters the reduced gradients over the ranks of a host, all-reduces each part
between hosts, and gathers the parts inside. See `tuner.training.hierarchy`. Gradients that are to be compressed are
compressed only between hosts.

Helps: several hosts with a slow network between them, above all where latency or the number of connections limits it.
Hurts: three collectives in place of one, and two copies of a bucket; a library that knows the topology already saves
most of the volume.

Numerics: `rounding`. Equal to a flat all-reduce but for the order of additions.

Source: Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision" (2018), arXiv 1807.11205
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.costs.reduction import likely_saved, most_saved, reduction
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, needs_ranks
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.hierarchical_allreduce.choice import HierarchicalAllreduceSetting
from steptune.tuner.strategies.hierarchical_allreduce.conflicts import CONFLICTS

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan


class HierarchicalAllreduce(Strategy):
    setting = HierarchicalAllreduceSetting
    conflicts = CONFLICTS
    summary = "all-reduce of gradients within each host, then between hosts"
    needs_workload = "Steptune must create the process groups"
    attacks = (Category.COMMUNICATION,)
    cures = (Cure.COMMUNICATE_LESS,)
    usual_realisation = 0.15

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return ({"levels": 2}, {"levels": 1})

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice == self.neutral(workload):
            return Supported()
        alone = needs_ranks(environment)
        if isinstance(alone, Unsupported):
            return alone
        ranks, hosts = environment.num_ranks, environment.num_hosts
        if hosts == 1:
            return Unsupported("all ranks are on one host; there is no slower inter-host link")
        if ranks % hosts:
            return Unsupported(f"requires the same number of ranks on every host: {ranks} ranks on {hosts} hosts")
        if ranks == hosts:
            return Unsupported("requires at least 2 ranks on each host, got 1")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["levels"] == 2:
            plan.wrap.hierarchical = True

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        return {"levels": choice["levels"]}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: exposed communication, less the minimum time of the requested reduction if the
        links are known.
        """
        today, then = reduction(situation), reduction(situation, **self.exchange(choice))
        if today is None or then is None:
            return without(situation, Category.COMMUNICATION)
        return {Category.COMMUNICATION: most_saved(situation, today, then)}

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        today, then = reduction(situation), reduction(situation, **self.exchange(choice))
        return None if today is None or then is None else likely_saved(situation, today, then)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.training.communication import hierarchy_of

        found = hierarchy_of(job.model)
        if found is None or not found.num_reductions:
            return {"levels": 1}
        return {"levels": 2, "hosts": found.levels.num_hosts, "ranks_per_host": found.levels.ranks_per_host}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        effect = super().took_effect(evidence, choice)
        if not effect.took or choice["levels"] == 1:
            return effect
        detail = f"{evidence.get('hosts')} hosts with {evidence.get('ranks_per_host')} ranks each"
        return Effect(strategy=self.name, took=True, detail=detail)
