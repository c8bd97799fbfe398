"""fused_kernels: kernels of `steptune.kernels` in place of groups of operators.

Mechanism: a pattern of ten operators writes and reads its intermediate results in the device's memory ten times; a
fused kernel keeps them in registers, and is one launch. Where modules of the model have the pattern of a kernel, they
call it instead: they keep parameters, inputs and outputs. Where the optimizer is a published LAMB or LARS, its step is
one kernel over all parameters: it keeps groups, options and state. Each kernel is switched by itself. Other packages
register kernels of their own by the entry point `steptune.kernels`.

Helps: patterns that neither PyTorch nor its compiler runs well, on CUDA; small batches most, where launches dominate.
Hurts: a kernel ends the compiler's fusion at its edges; the first use compiles it.

Numerics: `rounding`. Sums in another order; the guard compares each of them with the published code of the model.

Sources: Liu et al., "Swin Transformer" (2021), arXiv 2103.14030; Dao et al., "FlashAttention" (2022), arXiv 2205.14135;
You et al., "Large Batch Optimization for Deep Learning" (2020), arXiv 1904.00962; You et al., "Large Batch Training of
Convolutional Networks" (2017), arXiv 1708.03888; https://docs.pytorch.org/docs/stable/library.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.kernels.names import OF_OPTIMIZER, OURS
from steptune.tuner.costs.bounds import PRODUCTS, Savings, Situation, at_roofline, jointly, without
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, each_once, needs_cuda
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.fused_kernels.choice import FusedKernelsSetting

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload

_OF_MODEL = (*COMPUTE, Category.HOST, Category.LAUNCH_LATENCY, Category.SYNCHRONISATION)
_OF_OPTIMIZER = (Category.OPTIMIZER, Category.OPTIMIZER_HOST)
COMPILE_S = 20.0
"""Seconds to compile a kernel's forward and backward pass, for each shape that the model has."""


class FusedKernels(Strategy):
    setting = FusedKernelsSetting
    summary = "fused kernels in place of groups of operators"
    needs_workload = (
        "Steptune must replace parts of the model and the loss before training begins, which requires "
        "Workload.model and Workload.loss"
    )
    attacks = (*_OF_MODEL, *_OF_OPTIMIZER)
    cures = (Cure.FUSE_PARTS,)
    trial_cost_s = COMPILE_S
    recompiles = True
    has_order = False
    usual_realisation = 0.2

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        """Return one choice of all kernels that the model can use together, then one choice for each kernel alone."""
        useful = [name for name in self.defaults if workload.model.kernel_refusals.get(name) == ""]
        changes: list[Choice] = [dict.fromkeys(useful, True)] if useful else []
        changes += [{name: True} for name in self.defaults]
        return each_once(self.neutral(workload), changes)

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        today = self.neutral(workload)
        for name, wanted in choice.items():
            refusal = workload.model.kernel_refusals.get(name, "the model was not inspected for this kernel")
            if wanted and not today[name] and refusal:
                return Unsupported(f"{name}: {refusal}")
            if wanted and name in OURS and needs_cuda(environment) != Supported():
                return Unsupported(
                    f"{name}: requires a CUDA device (on a CPU, Triton can only interpret kernels for tests)"
                )
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        wanted = [name for name, wanted in choice.items() if wanted]
        if not wanted:
            return
        from steptune.kernels.applying import is_of_optimizer, use_kernel

        def use_kernels(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
            for name in in_model:
                model = use_kernel(model, name, workload)
            return model

        in_model = [name for name in wanted if not is_of_optimizer(name)]
        plan.optimizer.kernels += [name for name in wanted if name not in in_model]
        if in_model:
            plan.model.append(use_kernels)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: matmuls run at peak rate, and the other categories in which the strategy saves
        time count as saved entirely, because the share of the replaced operators in them is not known.
        """
        wanted = {name for name, is_wanted in choice.items() if is_wanted}
        of_optimizer = without(situation, *_OF_OPTIMIZER) if wanted & set(OF_OPTIMIZER) else {}
        if wanted <= set(OF_OPTIMIZER):
            return of_optimizer
        rest = [category for category in _OF_MODEL if category not in PRODUCTS]
        return jointly(at_roofline(situation, *PRODUCTS), jointly(without(situation, *rest), of_optimizer))

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.kernels.applying import operators_of, used_kernels

        used = used_kernels(job.model, job.optimizer, job.workload)
        return {
            **{name: name in used for name in self.defaults},
            "shown_by": {name: operators_of(name) for name in used},
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        """Judge whether the modules call the kernels and whether the profiled steps, if any, ran them."""
        effect = super().took_effect(evidence, choice)
        operators = evidence.get("operators", ())
        if not effect.took or not any(choice.values()) or not operators:
            return effect
        ran = []
        for name in (name for name, wanted in choice.items() if wanted):
            shown_by = evidence["shown_by"][name]
            seen = next((o for o in operators if any(part in o for part in shown_by)), None)
            if seen is None:
                detail = f"the profiled steps did not run {name} ({' or '.join(shown_by)})"
                return Effect(strategy=self.name, took=False, detail=detail)
            ran.append(seen)
        return Effect(strategy=self.name, took=True, detail=f"ran {', '.join(ran)}")
