"""model_recipe: matmuls at padded sizes, and a classifier on the mean of the tokens.

Mechanism: `pad_multiple` pads linear layers, the one over the vocabulary included, with zeros to sizes that are
multiples of 8 (or 64), and returns the part that was asked for: tensor cores read aligned groups of 8 16-bit numbers.
`pooled_classifier` leaves out the class token of a vision transformer and classifies the mean of the others: 196 tokens
(a multiple of 4) instead of 197.

Helps: matmuls with odd sizes, in 16 bits. Hurts: a padded weight is copied in every forward pass, and the part of a
result that is returned is a view with gaps, which the next operation may have to copy.

Numerics: padding is `rounding` (zeros enter no sum; the library may add in another order); a pooled classifier is a
`recipe`.

Sources: NVIDIA, "Matrix Multiplication Background User's Guide"
(https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html); pycls, vision
transformers with a pooled classifier (https://github.com/facebookresearch/pycls).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import (
    Savings,
    Situation,
    above_roofline,
    arithmetic,
    at_roofline,
    removable,
)
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Choice, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import HARDLY, Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.compile.choice import CompileSetting
from steptune.tuner.strategies.model_recipe.choice import ModelRecipeSetting

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload

UNALIGNED = {"bfloat16": 6.0, "float16": 6.0, "tf32": 2.0}
"""Usual slowdown of matmuls with unaligned sizes, by dtype. The 16-bit value was measured on a GPT-2 head (50,257
tokens) on an H200.
"""
KEPT_PART = 0.7
"""Share of the possible saving that padded matmuls usually realise, because weights and results are copied."""
SLOWEST = 16
"""Maximum slowdown of a matmul with unaligned sizes: without tensor cores an H100 reaches a fifteenth of its FLOP/s."""


class ModelRecipe(Strategy):
    setting = ModelRecipeSetting
    summary = "matmuls padded to multiples of 8 or 64; a pooled classifier"
    needs_workload = (
        "the model must be changed before its optimizer is created; only Workload.model makes that possible"
    )
    attacks = COMPUTE
    recompiles = True
    usual_realisation = 0.1

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return tuple(
            {"pad_multiple": multiple, "pooled_classifier": pooled}
            for multiple, pooled in ((8, False), (64, False), (1, True), (8, True))
        )

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        multiple = choice["pad_multiple"]
        if multiple == 8 and not workload.model.unaligned_linears.get("8"):
            return Unsupported("no effect: the sizes of all linear layers are multiples of 8")
        if multiple == 64 and not workload.model.unaligned_linears.get("64"):
            return Unsupported("no effect beyond padding to 8: no linear layer needs padding to 64")
        if choice["pooled_classifier"] and not workload.model.has_class_token:
            return Unsupported("requires a known class token: implement Workload.class_token")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.RECIPE if choice["pooled_classifier"] else Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        multiple = int(choice["pad_multiple"] or 1)

        def pad(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
            from steptune.tuner.training.padding import pad_linears

            return pad_linears(model, multiple)

        if multiple > 1:
            plan.model.append(pad)
        if choice["pooled_classifier"]:
            from steptune.tuner.training.pooled_classifier import pool_tokens

            plan.model.append(pool_tokens)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: padding brings matmuls with unaligned sizes to their roofline at best, and a
        pooled classifier, which needs fewer tokens, may shorten all compute.
        """
        today = situation.choices[self.name]
        if choice["pooled_classifier"] and not today["pooled_classifier"]:
            return at_roofline(situation, *COMPUTE)
        if choice["pad_multiple"] == today["pad_multiple"]:
            return {}
        flops = situation.workload.model.unaligned_flops.get(str(choice["pad_multiple"]), 0.0)
        time = SLOWEST * flops / (SLOWEST * flops + 1 - flops)
        products = above_roofline(situation, Category.MATMUL)
        return {Category.MATMUL: min(products, time * removable(situation, Category.MATMUL))}

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving: almost none if a compiler sees the whole model and pads by itself, or without
        tensor cores.
        """
        if choice["pooled_classifier"] or choice["pad_multiple"] == 1:
            return None
        compiled = situation.choices.get(CompileSetting.strategy, {})
        slowness = UNALIGNED.get(arithmetic(situation), 1.0)
        if slowness == 1 or (compiled.get("mode") is not None and compiled.get("scope") == "whole"):
            return HARDLY
        flops = situation.workload.model.unaligned_flops.get(str(choice["pad_multiple"]), 0.0)
        saved = (slowness - 1) * flops / (slowness * flops + 1 - flops)
        return KEPT_PART * saved * removable(situation, Category.MATMUL)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.training.padding import PaddedLinear
        from steptune.tuner.training.pooled_classifier import is_pooled

        multiples = {module.multiple for module in job.model.modules() if isinstance(module, PaddedLinear)}
        return {
            "pad_multiple": max(multiples, default=1),
            "pooled_classifier": is_pooled(_unwrapped(job), job.workload),
        }


def _unwrapped(job: TrainingJob) -> torch.nn.Module:
    from steptune.tuner.training.job import unwrapped

    return unwrapped(job.model)
