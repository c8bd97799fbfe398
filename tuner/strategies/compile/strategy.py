"""compile: torch.compile of the whole model or of every repeated block.

Mechanism: TorchDynamo traces the Python of a model into graphs, AOTAutograd adds the backward pass,
Inductor fuses element-wise work and reductions into few kernels. `reduce-overhead` records CUDA
graphs; `max-autotune` times several kernels for every matrix product. `regional` compiles the
repeated block once instead of the whole model: far less compilation where blocks are alike.

Helps: models with many small operators. Hurts: compilation takes from seconds to minutes (reported
cold, with the number of steps that pay for it); shapes that change are compiled again (`dynamic` compiles
for all of them from the start); every graph break costs.

Numerics: `rounding`. Fusions keep intermediate results in other precisions.

Sources: https://docs.pytorch.org/docs/stable/generated/torch.compile.html ,
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, above_roofline, at_roofline, jointly, removable, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.errors import COMPILER_MODULES
from steptune.tuner.records import Choice, Effect, Environment, Numerics, Scalar, ScriptFacts, WorkloadFacts
from steptune.tuner.strategies.api import (
    HARDLY,
    NeedsWorkload,
    Outside,
    Strategy,
    Support,
    Supported,
    Unsupported,
    Way,
    needs_cuda,
)
from steptune.tuner.strategies.compile.choice import MODES_WITH_GRAPHS, CompileSetting
from steptune.tuner.strategies.compile.conflicts import DROPPED
from steptune.tuner.strategies.cures import Cure

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload


SETTING_UP_S, KIND_S, BLOCK_S, MODEL_S = 8.0, 3.5, 1.8, 52.0
"""Seconds of a first compilation on a host with 16 cores, in this order: a fixed part; the first block of each kind;
each further block, if the whole model is compiled; a whole model without repeated blocks. The two parts per block are
needed once per training mode.
"""
AUTOTUNING = 4.0
"""Factor by which autotuning (choosing kernels by timing them) lengthens all parts but the fixed one."""
WHOLE_PART = 0.4
"""Share of its maximum saving that compiling the whole model usually realises; compiling only the blocks realises less.
"""
GRAPHS_PART = 0.7
"""Share of the device's waiting time for launches that CUDA graphs usually save."""
AUTOTUNED_PART = 0.15
"""Share of the matmuls' excess time over their roofline that autotuned kernels usually save."""


class Compile(Strategy):
    setting = CompileSetting
    dropped = DROPPED
    summary = "torch.compile of the whole model or of repeated blocks, and its mode"
    attacks = (
        Category.ELEMENTWISE,
        Category.NORMALISATION,
        Category.REDUCTION,
        Category.OTHER_COMPUTE,
        Category.HOST,
        Category.LAUNCH_LATENCY,
    )
    cures = (Cure.FUSE_OPERATORS,)
    raises = COMPILER_MODULES
    usual_realisation = 0.35
    exchange_realisation = 0.15
    recompiles = True

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        # Shapes that vary are dynamic from the second compilation on by themselves; from the first one saves that.
        varying = (None, True)
        # Blocks of one class whose inputs differ in shape are taken for one whose shapes vary.
        shapes: dict[str, tuple[bool | None, ...]] = {"regional": (False,), "whole": (None,)}
        default: list[Choice] = [
            {"mode": "default", "scope": scope, "dynamic": dynamic}
            for scope in self._scopes(workload)
            for dynamic in (varying if workload.varying_shapes else shapes[scope])
        ]
        slower: list[Choice] = [
            {"mode": mode, "scope": "whole", "dynamic": None}
            for mode in ("reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
        ]
        return (*default, *slower)

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["mode"] is None:
            return Supported()
        if environment.compiler is None:
            return Unsupported("torch.compile needs a C++ compiler: install g++ or clang++, or set CXX")
        if choice["scope"] == "regional" and workload.model.num_blocks < 2:
            return Unsupported(
                f"requires at least 2 repeated blocks, got {workload.model.num_blocks}: name them in Workload.blocks"
            )
        if choice["mode"] in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
            return needs_cuda(environment)
        return Supported()

    def _scopes(self, workload: WorkloadFacts) -> list[str]:
        """Return the scopes, sorted by their compilation time; the whole model comes first if both take equally
        long.
        """
        scopes = ["whole", "regional"] if workload.model.num_blocks > 1 else ["whole"]
        return sorted(scopes, key=lambda scope: self.cost_s({"mode": "default", "scope": scope}, workload))

    def cost_s(self, choice: Choice, workload: WorkloadFacts) -> float:
        """Return the expected seconds of compilation, as measured on an H200 for GPT-2, ViT-L, a ResNet and a Swin."""
        if choice.get("mode") is None:
            return 0.0
        training_modes = 2 if workload.randomness == "switchable" else 1  # the guard begins with dropout off
        num_blocks, num_kinds = workload.model.num_blocks, max(1, workload.model.num_block_kinds)
        if choice.get("scope") == "regional":
            seconds = KIND_S * num_kinds * training_modes
        elif num_blocks:
            seconds = (KIND_S * num_kinds + BLOCK_S * (num_blocks - num_kinds)) * training_modes
        else:
            seconds = MODEL_S
        return SETTING_UP_S + seconds * (AUTOTUNING if str(choice["mode"]).startswith("max-autotune") else 1.0)

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        mode = choice["mode"]
        if mode is None:
            return

        dynamic = choice.get("dynamic")
        assert dynamic is None or isinstance(dynamic, bool)

        def compile_model(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
            from steptune.tuner.training.compilation import compile_in_place
            from steptune.tuner.training.job import unwrapped

            # Inside DDP, which is PyTorch's own code: TorchDynamo cuts the graph at its buckets all the same.
            compile_in_place(unwrapped(model), str(mode), dynamic)
            return model

        def compile_blocks(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
            from steptune.tuner.training.compilation import allow_recompilations, compile_in_place

            blocks = workload.blocks(model)
            allow_recompilations(len(blocks))
            for block in blocks:
                compile_in_place(block, str(mode), dynamic)
            return model

        if choice["scope"] == "regional":
            plan.block_compilation.append(compile_blocks)
        else:
            plan.whole_compilation.append(compile_model)
        if mode in MODES_WITH_GRAPHS:
            plan.step.beginnings.append(_mark_step)

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside | NeedsWorkload:
        mode, dynamic = choice["mode"], choice["dynamic"]
        if script.compiled:
            return NeedsWorkload("the script already compiles its model")
        if choice["scope"] == "regional":
            return NeedsWorkload("the model's repeated blocks are known only from Workload.blocks")
        if mode in MODES_WITH_GRAPHS:
            return NeedsWorkload(
                "CUDA graphs overwrite their outputs in the next step, but the script's loop may "
                "still use these outputs"
            )
        if not script.models:
            return NeedsWorkload(
                "the script's loop never calls a trained module as a whole, only its methods or submodules"
            )
        said = [] if mode == "default" else [f'mode="{mode}"']
        said += [] if dynamic is None else [f"dynamic={dynamic}"]
        changes: dict[str, Scalar] = {"compile": mode, "compile_dynamic": dynamic}
        return Outside(way=Way.LIVE, changes=changes, words=f"model.compile({', '.join(said)})", at="model")

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        fused = without(situation, *self.attacks, Category.COPY_D2D, Category.ALLOCATION)
        return jointly(fused, at_roofline(situation, Category.MATMUL, Category.ATTENTION))

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving. CUDA graphs remove most of the waiting for launches; if the model is already
        compiled, only the additional features save time.
        """
        waiting = removable(situation, Category.HOST, Category.LAUNCH_LATENCY)
        graphs = choice["mode"] in MODES_WITH_GRAPHS
        if situation.choices[self.name]["mode"] is not None:
            return self._expected_of_another(situation, choice, waiting)
        part = WHOLE_PART if choice["scope"] == "whole" else self.usual_realisation
        return part * self.bound(situation, choice) + ((GRAPHS_PART - part) * waiting if graphs else 0.0)

    def _expected_of_another(self, situation: Situation, choice: Choice, waiting: float) -> float | None:
        """Return the expected saving if the incumbent is already compiled: that of the additional features only."""
        current = situation.choices[self.name]
        if choice["mode"] in MODES_WITH_GRAPHS and current["mode"] not in MODES_WITH_GRAPHS:
            return GRAPHS_PART * waiting
        if choice["scope"] == "whole" and current["scope"] == "regional":
            return None
        if _autotuned(choice) and not _autotuned(current):
            return AUTOTUNED_PART * above_roofline(situation, Category.MATMUL, Category.ATTENTION)
        return HARDLY

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.training.compilation import compilation

        found = compilation()
        if found is None:
            return {"graphs": 0}
        return {
            "graphs": found.num_graphs,
            "graph_breaks": found.num_graph_breaks,
            "recompilations": found.num_recompilations,
            "given_up": found.num_given_up,
            "cudagraph_skips": found.num_cudagraph_skips,
            "why_skipped": found.cudagraph_skips[0].reason if found.cudagraph_skips else "",
            "why_again": found.recompilations[0].reason if found.recompilations else "",
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        """Judge whether a graph was compiled, no function fell back to running uncompiled, and requested CUDA graphs
        were recorded.
        """
        if choice["mode"] is None:
            return Effect(strategy=self.name, took=True, detail="off")
        graphs, breaks = evidence.get("graphs", 0), evidence.get("graph_breaks", 0)
        detail = f"{graphs} graphs, {breaks} graph breaks, {evidence.get('recompilations', 0)} recompilations"
        if evidence.get("given_up"):
            why = evidence.get("why_again") or "guards failed repeatedly"
            return Effect(
                strategy=self.name,
                took=False,
                detail=f"{detail}: too many recompilations ({why}), so the function runs uncompiled",
            )
        if choice["mode"] in MODES_WITH_GRAPHS and evidence.get("cudagraph_skips", 0) >= max(1, graphs):
            why = evidence.get("why_skipped") or "no reason given"
            return Effect(strategy=self.name, took=False, detail=f"{detail}: no CUDA graph was recorded ({why})")
        return Effect(strategy=self.name, took=graphs > 0, detail=detail)


def _autotuned(choice: Choice) -> bool:
    return str(choice["mode"]).startswith("max-autotune")


def _mark_step() -> None:
    """Mark the beginning of a step, so that CUDA graphs of compiled regions can reuse the previous step's memory."""
    import torch

    torch.compiler.cudagraph_mark_step_begin()
