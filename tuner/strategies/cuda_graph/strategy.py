"""cuda_graph: record a whole step and replay it.

Mechanism: forward, backward, clipping and update are recorded as CUDA graphs, which are launched with one call each,
whatever the number of kernels in them. Batches are copied into fixed tensors, learning rates are tensors, steps that a
loss scaler skips are skipped on the device. An update that reads on the host what a scheduler changes in every step
(the rate of an SGD that is not fused, the betas of OneCycleLR) is launched by the host after the gradients' graph. See
`steptune.tuner.training.captured_step`.

Helps: steps of many short kernels, where the device waits for the host to launch them. Hurts: memory, since graphs keep
their own; recording takes some steps.

Numerics: `rounding`. The kernels are the same; the optimizer runs in its capturable form.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, needs_cuda
from steptune.tuner.strategies.cuda_graph.choice import CudaGraphSetting
from steptune.tuner.strategies.cuda_graph.conflicts import CONFLICTS, TOGETHER
from steptune.tuner.strategies.cures import Cure

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan


class CudaGraph(Strategy):
    setting = CudaGraphSetting
    conflicts = CONFLICTS
    together = TOGETHER
    summary = "record a whole step as CUDA graphs and replay it"
    needs_workload = (
        "a CUDA graph must record the whole step, which contains the script's own calls (item(), zero_grad, schedulers)"
    )
    attacks = (Category.HOST, Category.LAUNCH_LATENCY, Category.OPTIMIZER_HOST, Category.ALLOCATION)
    cures = (Cure.REPLAY_LAUNCHES,)
    raises = ("steptune.tuner.errors.CaptureError",)
    usual_realisation = 0.7
    trial_cost_s = 5.0

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return ({"scope": "step"}, {"scope": None})

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["scope"] is None:
            return Supported()
        if workload.custom_step:
            return Unsupported("not supported with a custom training_step, which cannot be recorded")
        if workload.varying_shapes:
            return Unsupported("requires batches of one shape, because a CUDA graph records one shape")
        if not workload.optimizer.capturable:
            return Unsupported(f"{workload.optimizer.name} does not support capturable=True")
        if environment.num_ranks > 1:
            return Unsupported("requires a single rank: recording collectives in a CUDA graph is not supported")
        return needs_cuda(environment)

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["scope"] == "step":
            plan.step.captured = True
            plan.optimizer.capturable = True

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        return without(situation, *self.attacks) if choice["scope"] else {}

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.training.captured_step import CapturedStep

        captured = job.runner
        if not isinstance(captured, CapturedStep):
            return {"scope": None}
        return {
            "scope": "step" if captured.num_replays else None,
            "replays": captured.num_replays,
            "recordings": captured.num_recordings,
            "record_ms": captured.record_ns // 1_000_000,
            "host_options": list(captured.host_options),
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        effect = super().took_effect(evidence, choice)
        if not effect.took or choice["scope"] is None:
            return effect
        detail = (
            f"{evidence.get('replays', 0)} steps replayed; recorded {evidence.get('recordings', 0)} times "
            f"in {evidence.get('record_ms', 0)} ms"
        )
        if evidence.get("host_options"):
            detail += (
                f"; the update is launched outside the CUDA graph, because the optimizer reads "
                f"{', '.join(evidence['host_options'])} on the host and these values change too often"
            )
        return Effect(strategy=self.name, took=True, detail=detail)
