"""gradient_compression: send fewer bytes of every gradient.

Mechanism: a communication hook of DDP replaces the all-reduce. `fp16` and `bf16` reduce in 16 bits; `int8` and
`one_bit` send a scale for every block and few bits for every number, by all-to-all and all-gather; `powersgd` sends a
matrix as the product of two thin ones of the given rank; `dgc` (deep gradient compression, SGD only) sends the given
share of every tensor, its largest elements. What a step of `one_bit`, `powersgd` or `dgc` does not send is added to
the next gradient (error feedback). See `tuner.training.compression`. FSDP has no hook, but can reduce in `bf16` itself.

Helps: networks much slower than the devices, such as Ethernet between hosts. Hurts: on NVLink compressing takes longer
than sending; with `dgc` the volume grows with the number of ranks.

Numerics: `lossy`. Judged on the loss over a longer horizon.

Sources: Lin et al., "Deep Gradient Compression" (2017), arXiv 1712.01887; Vogels et al., "PowerSGD" (2019), arXiv
1905.13727; Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Tang et al., "1-bit Adam" (2021),
arXiv 2102.02888; https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.costs.reduction import most_saved, reduction, saved
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import (
    BF16_ROUNDOFF,
    FP16_ROUNDOFF,
    Strategy,
    Support,
    Supported,
    Unsupported,
    needs_ranks,
)
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.gradient_compression.choice import GradientCompressionSetting
from steptune.tuner.strategies.gradient_compression.conflicts import CONFLICTS, DROPPED

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan


class GradientCompression(Strategy):
    setting = GradientCompressionSetting
    conflicts = CONFLICTS
    dropped = DROPPED
    summary = "gradients sent in 16, 8 or 1 bits, as low-rank factors, or only their largest elements"
    needs_workload = "communication hooks require a DDP that Steptune builds"
    attacks = (Category.COMMUNICATION,)
    cures = (Cure.COMMUNICATE_LESS,)
    usual_realisation = 0.3

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        ranks, ratios = (4, 2, 8), (0.01, 0.001)
        return (
            self.completed({"method": "bf16"}),
            self.completed({"method": "fp16"}),
            *(self.completed({"method": "powersgd", "rank": rank}) for rank in ranks),
            self.completed({"method": "int8"}),
            *(self.completed({"method": "dgc", "ratio": ratio}) for ratio in ratios),
            self.completed({"method": "one_bit"}),
            self.completed({"method": None}),
        )

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice == self.neutral(workload):
            return Supported()
        alone = needs_ranks(environment)
        if isinstance(alone, Unsupported) or choice["method"] is None:
            return alone
        if choice["method"] == "dgc":
            optimizer = workload.optimizer
            if optimizer.name != "SGD" or not optimizer.module.startswith("torch.optim"):
                return Unsupported(
                    f"method dgc requires torch.optim.SGD, got {optimizer.name}: momentum correction is "
                    "defined for SGD only"
                )
            if workload.custom_step:
                return Unsupported("not supported with a custom training_step, which may clip gradients a second time")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.EXACT if choice["method"] is None else Numerics.LOSSY

    def unit_roundoff(self, choice: Choice) -> float:
        if choice["method"] is None:
            return super().unit_roundoff(choice)
        return FP16_ROUNDOFF if choice["method"] == "fp16" else BF16_ROUNDOFF

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["method"] is None:
            return
        from steptune.tuner.training.plan import CompressionArguments

        plan.wrap.compression = CompressionArguments(
            method=str(choice["method"]),
            rank=int(choice["rank"] or 0),
            ratio=float(choice["ratio"] or 0),
            warm_up_steps=int(choice["warm_up_steps"] or 0),
        )

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        return {"compression": choice["method"], "rank": choice["rank"], "ratio": choice["ratio"]}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: exposed communication, less the minimum time of sending the compressed bytes if
        the links are known.
        """
        today, then = reduction(situation), reduction(situation, **self.exchange(choice))
        if today is None or then is None or choice["method"] == "powersgd":  # whose bytes are known by shapes only
            return without(situation, Category.COMMUNICATION)
        return {Category.COMMUNICATION: most_saved(situation, today, then)}

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving: the communication time saved, less the time that compression itself takes."""
        today = reduction(situation, compressing=True)
        then = reduction(situation, compressing=True, **self.exchange(choice))
        return None if today is None or then is None else saved(situation, today, then)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return the compression method of the running job, its settings, and the factor by which it reduces the bytes
        sent.
        """
        from steptune.tuner.training.communication import compression_of
        from steptune.tuner.training.sharding import is_sharded, reduction_factor

        if is_sharded(job.model):
            factor = reduction_factor(job.model)
            return {"method": "bf16", "factor": factor} if factor > 1.0 else {"method": None}
        found = compression_of(job.model)
        return {"method": None} if found is None else {"method": found.method, **found.settings, "factor": found.factor}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        if evidence.get("method") != choice["method"] or choice["method"] is None:
            took = evidence.get("method") == choice["method"]
            return Effect(
                strategy=self.name,
                took=took,
                detail=f"gradients are sent as {evidence.get('method') or 'uncompressed tensors'}",
            )
        effect = super().took_effect(evidence, choice)
        factor = evidence.get("factor", 1.0)
        if not effect.took:
            return effect
        return Effect(strategy=self.name, took=factor > 1.0, detail=f"{factor:.1f} times fewer bytes were sent")
