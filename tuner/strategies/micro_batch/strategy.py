"""micro_batch: split the batch into micro-batches whose gradients are accumulated.

Mechanism: forward and backward of one micro-batch at a time; the optimizer runs once. The weighted losses of the
micro-batches add up to the loss of the whole batch (tokens are weighted by their number).

Helps: memory, in proportion to their number; on a CPU a micro-batch that fits the cache can be faster. Fewer
micro-batches than today help when launches dominate. Hurts: small ones use a device badly.

Numerics: `rounding` (gradients are summed in another order). Losses that compare samples of a batch
with one another change their meaning: the guard sees that.

Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, at_roofline, jointly, without
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Choice, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.micro_batch.choice import MicroBatchSetting

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

MAX_PIECES = 16


class MicroBatch(Strategy):
    setting = MicroBatchSetting
    summary = "gradient accumulation over micro-batches"
    needs_workload = "the script's own loop runs forward and backward over the whole batch"
    attacks = COMPUTE
    cures = (
        Cure.LAUNCH_PER_LARGER_PIECE,
        Cure.ENLARGE_PIECES,
        Cure.SHRINK_PIECES,
        Cure.TUNE_COMPUTE,
        Cure.COMMUNICATE_LESS,
        Cure.HOLD_LESS,
    )
    recompiles = True
    usual_realisation = 0.05
    memory = True

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        batch = workload.global_batch // environment.num_ranks
        pieces = [n for n in range(1, min(batch, MAX_PIECES) + 1) if batch % n == 0]
        today = int(self.neutral(workload)["num_micro_batches"] or 1)
        pieces.sort(key=lambda n: (abs(n.bit_length() - today.bit_length()), n))
        return tuple({"num_micro_batches": n} for n in pieces)

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if workload.model.has_batch_statistics and choice != self.neutral(workload):
            return Unsupported(
                "not supported with batch normalisation: its statistics would be computed over batches of another size"
            )
        if choice["num_micro_batches"] == 1:
            return Supported()
        if workload.custom_step:
            return Unsupported("not supported with a custom training_step")
        if not workload.batch_splittable:
            return Unsupported("requires batches whose tensors share their first dimension")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        plan.step.num_micro_batches = int(choice["num_micro_batches"] or 1)

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        return {"num_micro_batches": choice["num_micro_batches"] or 1}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        today = int(situation.choices[self.name]["num_micro_batches"] or 1)
        wanted = int(choice["num_micro_batches"] or 1)
        if wanted < today:
            return jointly(at_roofline(situation), without(situation, Category.HOST, Category.LAUNCH_LATENCY))
        if situation.environment.hardware.device_kind == "cuda":
            return {}
        return at_roofline(situation)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        count = job.runner.num_pieces
        return {} if count is None else {"num_micro_batches": count}
