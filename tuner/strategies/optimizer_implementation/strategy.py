"""optimizer_implementation: the same optimizer as a loop, multi-tensor or fused, over contiguous parameters or not.

Mechanism: `for_loop` runs a dozen operators per parameter tensor; `foreach` runs each operator on all
tensors at once; `fused` runs the whole update in one kernel that reads and writes every element once.
`contiguous` lays all parameters of a group out in one buffer, so that any of them runs over a few large
tensors.

Helps: models with many parameter tensors, and steps whose compute is short. Hurts: `foreach` holds
temporaries of the size of the parameters; `contiguous` copies every gradient once.

Numerics: `rounding`. Contiguous parameters are exact for optimizers that treat every element alike, up to
the rounding of vector instructions, and refused for others.

Source: https://docs.pytorch.org/docs/stable/optim.html; https://github.com/PhilJd/contiguous_pytorch_params
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, ScriptFacts, WorkloadFacts
from steptune.tuner.strategies.api import NeedsWorkload, Outside, Strategy, Support, Supported, Unsupported, Way
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.optimizer_implementation.choice import OptimizerImplementationSetting
from steptune.tuner.training.flat_parameters import ELEMENT_WISE

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan


class OptimizerImplementation(Strategy):
    setting = OptimizerImplementationSetting
    summary = "for-loop, foreach or fused update, optionally over contiguous parameters"
    attacks = (Category.OPTIMIZER, Category.OPTIMIZER_HOST)
    cures = (Cure.FUSE_UPDATE,)
    touches = (Category.OPTIMIZER, Category.OPTIMIZER_HOST)
    usual_realisation = 0.7
    exchange_realisation = 0.1

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        ways = [("fused", False), ("foreach", False), ("for_loop", False), ("fused", True), (None, True)]
        return tuple({"implementation": name, "contiguous": contiguous} for name, contiguous in ways)

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        optimizer, wanted = workload.optimizer, choice["implementation"]
        if choice["contiguous"]:
            support = _supports_contiguous(workload)
            if isinstance(support, Unsupported):
                return support
        if wanted is None:
            return Supported()
        if wanted not in optimizer.implementations:
            available = ", ".join(optimizer.implementations) or "none"
            return Unsupported(f"{optimizer.name} has no {wanted} implementation (it has: {available})")
        if wanted == optimizer.implementation and not choice["contiguous"]:
            return Unsupported("already the optimizer's implementation")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["implementation"] is not None:
            plan.optimizer.implementation = str(choice["implementation"])
        if choice["contiguous"]:
            plan.optimizer.contiguous = True

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside | NeedsWorkload:
        name = choice["implementation"]
        if choice["contiguous"]:
            return NeedsWorkload("contiguous parameters require an optimizer that Steptune creates")
        if script.sparse:
            return NeedsWorkload("a layer produces sparse gradients, which fused and foreach updates do not support")
        if not script.optimizers:
            return NeedsWorkload("the script updates its parameters without an optimizer")
        flags = {"fused": "fused=True", "foreach": "foreach=True", "for_loop": "foreach=False"}
        words = " and ".join(f"{kind}({flags[str(name)]})" for kind in dict.fromkeys(script.optimizers))
        return Outside(way=Way.LIVE, changes={"optimizer": name}, words=words, at="optimizer")

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        return without(situation, Category.OPTIMIZER, Category.OPTIMIZER_HOST)

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return an expected saving of 0 for a for-loop in place of a multi-tensor or fused update; else None."""
        today = situation.choices[self.name]["implementation"] or situation.workload.optimizer.implementation
        return 0.0 if choice["implementation"] == "for_loop" and today in ("foreach", "fused") else None

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        group = job.optimizer.param_groups[0]
        name = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "for_loop"
        if job.plan.wrap.shards_parameters:
            return {"implementation": name, "contiguous": False}  # parts have no storage that could be compared
        trained = {id(parameter) for _, parameter in job.updated_parameters()}
        held = {parameter.untyped_storage().data_ptr() for g in job.optimizer.param_groups for parameter in g["params"]}
        own = any(id(parameter) in trained for g in job.optimizer.param_groups for parameter in g["params"])
        inside = all(p.untyped_storage().data_ptr() in held for _, p in job.updated_parameters())
        return {"implementation": name, "contiguous": inside and not own}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        asked: Choice = {name: value for name, value in choice.items() if value not in (None, False)}
        return super().took_effect(evidence, asked)


def _supports_contiguous(workload: WorkloadFacts) -> Support:
    optimizer = workload.optimizer
    if workload.custom_step:
        return Unsupported("not supported with a custom training_step, which may read gradients")
    if not optimizer.module.startswith("torch.optim"):
        return Unsupported(
            f"requires an element-wise optimizer from torch.optim; {optimizer.name} is not known to be one"
        )
    if optimizer.name not in ELEMENT_WISE:
        return Unsupported(f"{optimizer.name} needs per-parameter shapes or norms, which flattened parameters lose")
    return Supported()
