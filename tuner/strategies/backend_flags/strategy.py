"""backend_flags: switches of the libraries that operators call.

`cudnn_benchmark` times cuDNN's algorithms for every shape once and keeps the fastest: helps
convolutions of constant shape, hurts when shapes vary. `tf32` lets the matmuls that stay in FP32 use the tensor cores
(10 bits of mantissa). `flush_denormals` makes the CPU treat denormal numbers as zero, because it computes with them an
order of magnitude slower than with others.

Numerics: `rounding`.

Sources: https://docs.pytorch.org/docs/stable/backends.html ,
https://docs.pytorch.org/docs/stable/generated/torch.set_flush_denormal.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, arithmetic, at_roofline, jointly, without
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, Scalar, ScriptFacts, WorkloadFacts
from steptune.tuner.strategies.api import (
    TF32_ROUNDOFF,
    NeedsWorkload,
    Outside,
    Strategy,
    Support,
    Supported,
    Unsupported,
    Way,
    needs_cuda,
)
from steptune.tuner.strategies.backend_flags.choice import BackendFlagsSetting
from steptune.tuner.strategies.backend_flags.conflicts import DROPPED
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.training.fp32_products import fp32_products

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan


class BackendFlags(Strategy):
    setting = BackendFlagsSetting
    dropped = DROPPED
    summary = "cuDNN benchmark mode, TF32 for remaining FP32 matmuls, denormals flushed to zero"
    attacks = COMPUTE
    cures = (Cure.TUNE_COMPUTE,)
    touches = (*COMPUTE, Category.OPTIMIZER)
    recompiles = True
    usual_realisation = 0.03

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        neutral = self.neutral(workload)
        return (
            {**neutral, "cudnn_benchmark": True, "tf32": True},
            {**neutral, "cudnn_benchmark": True},
            {**neutral, "tf32": True},
            {**neutral, "flush_denormals": True},
        )

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["cudnn_benchmark"] or choice["tf32"]:
            found = needs_cuda(environment)
            if isinstance(found, Unsupported):
                return found
        if choice["flush_denormals"] and environment.hardware.device_kind != "cpu":
            return Unsupported("requires training on the CPU: denormals slow down CPU arithmetic only")
        has_conv = any("Conv" in name for name in workload.model.module_types)
        if choice["cudnn_benchmark"] and not has_conv:
            return Unsupported("requires a convolution; the model has none")
        if choice["cudnn_benchmark"] and workload.varying_shapes:
            return Unsupported("requires batches of one shape: cuDNN would benchmark every new shape again")
        return Supported()

    def likely_part(self, workload: WorkloadFacts) -> float:
        """Return the share of the maximum saving that is usually realised. It is larger for models with convolutions,
        because cuDNN has several algorithms for them.
        """
        return 0.15 if workload.model.module_types.get("Conv2d", 0) > 1 else self.usual_realisation

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def unit_roundoff(self, choice: Choice) -> float:
        return TF32_ROUNDOFF if choice["tf32"] else super().unit_roundoff(choice)

    def contribute(self, plan: Plan, choice: Choice) -> None:
        def set_flags() -> None:
            import torch

            if choice["cudnn_benchmark"]:
                torch.backends.cudnn.benchmark = True
            if choice["tf32"]:
                torch.set_float32_matmul_precision("high")
            if choice["flush_denormals"]:
                torch.set_flush_denormal(True)

        if choice != self.defaults:
            plan.environment.append(set_flags)

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside | NeedsWorkload:
        if choice["cudnn_benchmark"] and script.deterministic:
            return NeedsWorkload(
                "the script sets torch.backends.cudnn.deterministic, which conflicts with cudnn_benchmark"
            )
        changes: dict[str, Scalar] = {
            "cudnn_benchmark": choice["cudnn_benchmark"],
            "matmul_precision": "high" if choice["tf32"] else "highest",
            "flush_denormals": choice["flush_denormals"],
        }
        calls = {
            "torch.backends.cudnn.benchmark = True": choice["cudnn_benchmark"],
            'torch.set_float32_matmul_precision("high")': choice["tf32"],
            "torch.set_flush_denormal(True)": choice["flush_denormals"],
        }
        words = "; ".join(call for call, wanted in calls.items() if wanted) or "PyTorch's default flags"
        return Outside(way=Way.LIVE, changes=changes, words=words)

    def computation(self, choice: Choice) -> Mapping[str, Any]:
        return {"rest_in_tf32": choice["tf32"]}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        current = situation.choices[self.name]
        if choice["flush_denormals"] and not current["flush_denormals"]:
            return jointly(at_roofline(situation), without(situation, Category.OPTIMIZER))
        return at_roofline(situation, Category.MATMUL, dtype=arithmetic(situation, **self.computation(choice)))

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        import torch

        return {
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "tf32": fp32_products() == "high",
            "flush_denormals": _flushes_denormals(),
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        """Judge the flags. If this strategy leaves TF32 off, TF32 is not judged, because `precision` may enable it."""
        return super().took_effect(evidence, {k: v for k, v in choice.items() if k != "tf32" or v})


def _flushes_denormals() -> bool:
    import torch

    return bool((torch.tensor([1e-39]) * 1.0).item() == 0.0)
