"""compile: torch.compile of the whole model or of every repeated block.

Mechanism: TorchDynamo traces the Python of a model into graphs, AOTAutograd adds the backward pass,
Inductor fuses element-wise work and reductions into few kernels. `reduce-overhead` records CUDA
graphs; `max-autotune` times several kernels for every matrix product. `regional` compiles the
repeated block once instead of the whole model: far less compilation, almost the same speed.

Helps: models with many small operators. Hurts: compilation takes from seconds to minutes (reported
cold, with the number of steps that pay for it); shapes that change are compiled again; every graph
break costs.

Numerics: `rounding`. Fusions keep intermediate results in other precisions.

Sources: https://docs.pytorch.org/docs/stable/generated/torch.compile.html ,
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tuner.profiling.bounds import Situation, above_roofline, removable
from tuner.profiling.categories import Category
from tuner.records import Choice, Effect, Environment, Numerics, Scalar, WorkloadFacts
from tuner.strategies.base import Strategy, Support, Supported, Unsupported, needs_cuda

if TYPE_CHECKING:
    import torch

    from tuner.training.job import TrainingJob
    from tuner.training.plan import Plan
    from tuner.workloads.workload import Workload


class Compile(Strategy):
    name = "compile"
    summary = "torch.compile: mode, whole model or repeated blocks"
    defaults: ClassVar[Choice] = {"mode": None, "scope": "whole"}
    values: ClassVar[Mapping[str, tuple[Scalar | range, ...]]] = {
        "mode": (None, "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"),
        "scope": ("whole", "regional"),
    }
    attacks = (
        Category.ELEMENTWISE,
        Category.NORMALISATION,
        Category.REDUCTION,
        Category.OTHER_COMPUTE,
        Category.HOST,
        Category.LAUNCH_LATENCY,
    )
    usual_realisation = 0.35
    exchange_realisation = 0.15
    trial_cost_s = 45.0

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        regional: tuple[Choice, ...] = (
            ({"mode": "default", "scope": "regional"},) if workload.model.num_blocks > 1 else ()
        )
        return (
            *regional,
            {"mode": "default", "scope": "whole"},
            {"mode": "reduce-overhead", "scope": "whole"},
            {"mode": "max-autotune-no-cudagraphs", "scope": "whole"},
            {"mode": "max-autotune", "scope": "whole"},
        )

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["mode"] is None:
            return Supported()
        if environment.compiler is None:
            return Unsupported("torch.compile needs a C++ compiler: install g++ or clang++, or set CXX")
        if choice["scope"] == "regional" and workload.model.num_blocks < 2:
            return Unsupported("the model has no repeated blocks; name them in Workload.blocks")
        if choice["mode"] in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
            return needs_cuda(environment)
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        mode = choice["mode"]
        if mode is None:
            return

        def compile_model(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
            _compile(model, str(mode))
            return model

        def compile_blocks(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
            for block in workload.blocks(model):
                _compile(block, str(mode))
            return model

        if choice["scope"] == "regional":
            plan.block_compilation.append(compile_blocks)
        else:
            plan.whole_compilation.append(compile_model)

    def bound(self, situation: Situation, choice: Choice) -> float:
        fused = removable(situation, *self.attacks, Category.COPY_D2D, Category.ALLOCATION)
        return min(1.0, fused + above_roofline(situation, Category.MATMUL, Category.ATTENTION))

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from torch._dynamo.utils import counters

        return {
            "graphs": int(counters["stats"]["unique_graphs"]),
            "graph_breaks": int(sum(counters["graph_break"].values())),
            "recompilations": int(sum(counters["recompiles"].values())) if "recompiles" in counters else 0,
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        if choice["mode"] is None:
            return Effect(strategy=self.name, took=True, detail="off")
        graphs, breaks = evidence.get("graphs", 0), evidence.get("graph_breaks", 0)
        return Effect(strategy=self.name, took=graphs > 0, detail=f"{graphs} graphs, {breaks} graph breaks")


def _compile(module: torch.nn.Module, mode: str) -> None:
    """Compiles a module in place.

    TorchDynamo begins no graph in a frame of torch's own code, so `module.compile()` alone does nothing
    for an `nn.Sequential` of torch's own layers or an `nn.TransformerEncoderLayer`: their forward pass
    gets a frame of ours.
    """
    forward = module.forward
    if forward.__module__.partition(".")[0] == "torch":

        def framed(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        module.forward = framed
    module.compile(mode=mode)
