"""length_balancing: batches of samples of similar length, balanced across ranks.

Mechanism: every sample of a batch is padded to the longest one. Within a pool of batches the samples are sorted by
length, cut into batches of as many samples as before, and the batches shuffled; within a batch the longest samples are
dealt first, each to the rank with the least work. So batches hold less padding, and ranks wait less for one another.

Helps: lengths that vary a lot, such as text, speech or proteins. Hurts: batches are no longer drawn independently of
length, which some training notices.

Numerics: `recipe` (other samples meet in a batch; every index still comes once an epoch).

Source: Graham, "Bounds on multiprocessing timing anomalies" (SIAM J. Appl. Math. 17, 1969) for the dealing; batch
samplers: https://docs.pytorch.org/docs/stable/data.html#loading-batched-and-non-batched-data
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, jointly, part_of, without
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.length_balancing.choice import LengthBalancingSetting

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

POOLS = (16, 64)
"""Pool sizes in batches. Timing windows span whole pools, so larger pools take longer to measure."""
MAX_POOL_S = 10.0
"""Maximum time, in seconds, that the steps of a pool may take."""


class LengthBalancing(Strategy):
    setting = LengthBalancingSetting
    summary = "batches of samples of similar length, balanced across ranks"
    needs_workload = "the script's own sampler determines the order of samples"
    attacks = (*COMPUTE, Category.COMMUNICATION)
    recompiles = True
    usual_realisation = 0.6

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        longest = min(POOLS[-1], workload.steps_per_epoch or POOLS[-1])
        pools = {min(pool, longest) for pool in POOLS}
        return tuple({"pool_batches": pool} for pool in sorted(pools, reverse=True) if pool > 1) or (
            {"pool_batches": POOLS[0]},
        )

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        pool = int(choice["pool_batches"] or 0)
        if pool == 0:
            return Supported()
        if workload.dataset.kind == "iterable":
            return Unsupported("requires a map-style dataset: an iterable dataset sets its own order of samples")
        if workload.sampling == "batch_sampler":
            return Unsupported("not supported with a custom batch_sampler, which decides which samples form a batch")
        if workload.sampling == "sampler" and environment.num_ranks > 1:
            return Unsupported(
                "not supported with a custom sampler on more than one rank: Steptune cannot tell whether the "
                "sampler yields all samples or one rank's part"
            )
        if workload.dataset.padding_share is None:
            return Unsupported(
                "requires the lengths of samples: implement Workload.length, or add the attribute `lengths` "
                "to the dataset"
            )
        if workload.dataset.padding_share == 0:
            return Unsupported("no effect: no inspected batch has padding")
        seconds = pool * workload.sample_step_ns / 1e9
        if seconds > MAX_POOL_S and pool > POOLS[0]:
            return Unsupported(
                f"a timing window must span a whole pool, which must take at most {MAX_POOL_S:.0f} "
                f"s, got {seconds:.0f} s"
            )
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.RECIPE

    def contribute(self, plan: Plan, choice: Choice) -> None:
        plan.batches.pool_batches = int(choice["pool_batches"] or 0)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: all padding, and all waiting for other ranks. The time of a matmul falls in
        proportion to the padded tokens, that of attention at most with their square.
        """
        padding = situation.workload.dataset.padding_share or 0.0
        if not choice["pool_batches"] or situation.choices[self.name]["pool_batches"] == choice["pool_batches"]:
            return {}
        compute = part_of(without(situation, *COMPUTE), 1 - (1 - padding) ** 2)
        return jointly(compute, without(situation, Category.COMMUNICATION))

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        from steptune.tuner.training.regrouping import padding_share

        sampler = getattr(job.loader, "batch_sampler", None)
        length = getattr(sampler, "length", None)
        if sampler is None or length is None or not job.plan.batches.pool_batches:
            return {"pool_batches": 0}
        after, before = sampler.first_pool()
        return {
            "pool_batches": job.plan.batches.pool_batches,
            "padding_before": padding_share(before, length, sampler.num_ranks),
            "padding_after": padding_share(after, length, sampler.num_ranks),
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        if choice["pool_batches"] == 0 or evidence["pool_batches"] != choice["pool_batches"]:
            return super().took_effect(evidence, choice)
        before, after = evidence["padding_before"], evidence["padding_after"]
        detail = f"padding in the first pool: {before:.0%} before, {after:.0%} now"
        return Effect(strategy=self.name, took=after <= before, detail=detail)
