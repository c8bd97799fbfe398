"""allocator: settings of the CUDA caching allocator.

Mechanism: the allocator keeps freed memory for later requests. Where sizes vary, this memory becomes fragmented into
pieces that fit no request. `expandable_segments` maps pages behind one another, so that a segment can grow;
`max_split_size_mb` keeps blocks above that size whole.

Helps: running out of memory while much is reserved and not allocated; steps that allocate from the device again and
again (`allocation`). Hurts: mapping pages takes time; blocks kept whole are lost for small requests.

Numerics: `exact` (only addresses change).

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, ScriptFacts, WorkloadFacts
from steptune.tuner.strategies.allocator.choice import MAX_SPLIT_MB, AllocatorSetting
from steptune.tuner.strategies.api import NeedsWorkload, Outside, Strategy, Support, Supported, Way, needs_cuda
from steptune.tuner.strategies.cures import Cure

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of the allocator, both set to the same text. Torch reads the first before the second, but up to
version 2.11 it takes expandable_segments for CUDA only from the second (pytorch #183387).
"""


class Allocator(Strategy):
    setting = AllocatorSetting
    summary = "settings of the CUDA caching allocator: expandable segments, maximum size of blocks that may be split"
    attacks = (Category.ALLOCATION,)
    cures = (
        Cure.KEEP_ALLOCATED,
        Cure.HOLD_LESS,
    )
    touches = (Category.ALLOCATION, Category.HOST, Category.LAUNCH_LATENCY)
    usual_realisation = 0.5
    memory = True
    trial_cost_s = 5.0

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return (
            {"expandable_segments": True, "max_split_size_mb": None},
            {"expandable_segments": False, "max_split_size_mb": 128},
            {"expandable_segments": False, "max_split_size_mb": 512},
            {"expandable_segments": False, "max_split_size_mb": None},
        )

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        return Supported() if choice == self.defaults else needs_cuda(environment)

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.EXACT

    def environment_variables(self, choice: Choice) -> dict[str, str]:
        if choice == self.defaults:
            return {}
        settings = [f"expandable_segments:{choice['expandable_segments']}"]
        if choice["max_split_size_mb"] is not None:
            settings.append(f"max_split_size_mb:{choice['max_split_size_mb']}")
        return dict.fromkeys(VARIABLES, ",".join(settings))

    def contribute(self, plan: Plan, choice: Choice) -> None:
        """Add nothing to the plan: the environment variables are the whole effect."""

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside | NeedsWorkload:
        variables = self.environment_variables(choice)
        return Outside(way=Way.START, changes={}, words=" ".join(f"{n}={value}" for n, value in variables.items()))

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        return {} if choice == situation.choices[self.name] else without(situation, Category.ALLOCATION)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        if job.device.type != "cuda":
            return {}
        import torch

        stats = torch.cuda.memory_stats(job.device)
        return {
            **settings_of(torch.cuda.memory._snapshot(job.device)),
            "num_device_alloc": stats.get("num_device_alloc", 0),
            "num_alloc_retries": stats.get("num_alloc_retries", 0),
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        found = super().took_effect(evidence, choice)
        if not found.took or "num_device_alloc" not in evidence:
            return found
        detail = (
            f"{evidence['num_device_alloc']} device allocations, {evidence['num_alloc_retries']} allocation retries"
        )
        return Effect(strategy=self.name, took=True, detail=detail)


def settings_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the strategy's parameters, read from a snapshot of the allocator; a maximum split size of -1 or of the
    largest integer means no limit.
    """
    settings = snapshot["allocator_settings"]
    split_mb = int(settings["max_split_size"]) / (1 << 20)
    limited = 0 < split_mb < MAX_SPLIT_MB
    return {
        "expandable_segments": bool(settings["expandable_segments"]),
        "max_split_size_mb": int(split_mb) if limited else None,
    }
