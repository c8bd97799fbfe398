"""moe_experts: how the experts of a mixture-of-experts model run.

Mechanism: `looped` runs one expert after the other on the tokens that chose it, whose number the host must
know; `batched` gives every expert slots for as many tokens as it may take and runs all at once, as one batched
product of constant shapes; `grouped` sorts the tokens by expert and runs one kernel over groups of any size.

Helps: many experts with few tokens each, where a loop waits for the device at every expert and fills it badly; and
whatever needs constant shapes (CUDA graphs). Hurts: `batched` computes empty slots too, and keeps them in memory.

Numerics: `rounding`. The same products, added in another order.

Sources: Lepikhin et al., "GShard" (2020), arXiv 2006.16668; Gale et al., "MegaBlocks" (2022), arXiv 2211.15841;
https://huggingface.co/docs/transformers/experts_interface
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, at_roofline, jointly, without
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.moe_experts.choice import MoeExpertsSetting

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload


class MoeExperts(Strategy):
    setting = MoeExpertsSetting
    summary = "looped, batched or grouped execution of the experts in a mixture-of-experts layer"
    needs_workload = (
        "the model must be changed before its optimizer is created; only Workload.model makes that possible"
    )
    attacks = (*COMPUTE, Category.SYNCHRONISATION, Category.COPY_D2H, Category.HOST, Category.LAUNCH_LATENCY)
    recompiles = True
    usual_realisation = 0.3

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return ({"execution": "grouped"}, {"execution": "batched"}, {"execution": "looped"})

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        name, model = choice["execution"], workload.model
        if name is None:
            return Supported()
        if name not in model.expert_implementations:
            offered = ", ".join(model.expert_implementations)
            has = f"the model's experts support: {offered}" if offered else "the model has no mixture-of-experts layers"
            return Unsupported(f"requires {name} experts; {has}")
        if name == model.expert_implementation:
            return Unsupported("already the current setting")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        name = choice["execution"]
        if name is not None:
            from steptune.tuner.training.experts import use_implementation

            def execute_experts(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
                return use_implementation(model, str(name))

            plan.model.append(execute_experts)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: matmuls run at peak rate, and the other categories in which the strategy saves
        time count as saved entirely, because the experts' share in them is not known.
        """
        rest = [category for category in self.attacks if category not in (Category.MATMUL, Category.ATTENTION)]
        return jointly(at_roofline(situation, Category.MATMUL), without(situation, *rest))

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.training.experts import used_implementation

        return {"execution": used_implementation(job.model)}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        """Compare the requested execution with the model's; without a request, every execution matches."""
        return super().took_effect(evidence, {} if choice["execution"] is None else choice)
