"""attention_mask: causal attention by a flag instead of a computed mask.

Mechanism: models of the transformers library compute a mask in every step, from a padding mask and from positions, in
which several packed sequences would show. Without either, the mask equals that of `is_causal`; run op by op, the
library detects this by reading one value from the device. A compiler cannot read values, so a model that is compiled as
a whole computes the mask and hands it to the attention, which flash kernels do not take. `is_causal` registers the same
attention under a name without masks, so that the flag alone is left.

Helps: causal models that are compiled as a whole; and steps that are to be recorded as CUDA graphs, because no value is
read from the device any more. Hurts: no case is known.

Numerics: `rounding`. Compiled, another kernel computes the same.

Sources: https://huggingface.co/docs/transformers/attention_interface ,
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, removable, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import HARDLY, Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.attention_mask.choice import AttentionMaskSetting
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.cures import Cure

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload

WITHOUT_MASK = 0.4
"""Share of attention time expected to be saved without a mask: half of the scores are not needed."""


class AttentionMask(Strategy):
    setting = AttentionMaskSetting
    summary = "causal attention with the is_causal flag instead of a computed mask"
    needs_workload = "Steptune must check on batches of Workload.dataset that the masks are causal"
    attacks = (Category.ATTENTION, Category.SYNCHRONISATION, Category.HOST)
    cures = (Cure.LAUNCH_PER_LARGER_PIECE,)
    recompiles = True
    usual_realisation = 0.2

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return ({"is_causal": True},)

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["is_causal"] and workload.model.mask_refusal:
            return Unsupported(workload.model.mask_refusal)
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["is_causal"]:
            from steptune.tuner.training.causal_attention import use_causal_flag

            def pass_causal_flag(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
                return use_causal_flag(model)

            plan.model.append(pass_causal_flag)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        if situation.choices[self.name]["is_causal"] or not choice["is_causal"]:
            return {}
        return without(situation, *self.attacks)

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving: the time that attention saves without a mask, if the model is compiled as a
        whole. Otherwise almost nothing is saved, because the transformers library then omits the mask by itself.
        """
        compiled = situation.choices.get(CompileSetting.strategy, {})
        if compiled.get("mode") is None or compiled.get("scope") != "whole":
            return HARDLY
        return WITHOUT_MASK * removable(situation, Category.ATTENTION)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.training.causal_attention import uses_causal_flag

        return {"is_causal": uses_causal_flag(job.model)}
