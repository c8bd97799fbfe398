"""ddp_buckets: how DistributedDataParallel groups gradients for reduction.

Mechanism: DDP reduces a bucket of gradients as soon as all of them are there, while the backward pass goes on. The
first bucket is small, so that communication begins early; the others hold `bucket_cap_mb`. A static graph says that the
parameters in use never change, so that DDP need not look for unused ones; with `bucket_views` gradients live in their
bucket instead of being copied into it and out of it. `find_unused` looks for parameters without a gradient in every
step.

Helps: exposed communication. Small buckets start early and pay latency often; large ones leave a long tail after the
last gradient. Hurts: a static graph fails where the parameters in use change from step to step.

Numerics: `rounding`. Other groups are added in another order.

Sources: Li et al., "PyTorch Distributed" (2020), arXiv 2006.15704;
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, jointly, removable, total, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.costs.reduction import Reduction, most_saved, reduction, saved
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, each_once, needs_ranks
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.ddp_buckets.choice import DdpBucketsSetting
from steptune.tuner.strategies.ddp_buckets.conflicts import CONFLICTS

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

MIB = 2**20
CAPS_MB = (50, 100, 200, 5, 1)
"""Bucket sizes in MiB that are tried in addition to PyTorch's default of 25, the most promising first."""
SIZES = ("bucket_cap_mb", "first_bucket_mb")


class DdpBuckets(Strategy):
    setting = DdpBucketsSetting
    conflicts = CONFLICTS
    summary = "DDP settings: bucket sizes, static graph, gradients as views of their buckets"
    needs_workload = "the script builds its own DDP; Steptune builds DDP only for a Workload"
    attacks = (Category.COMMUNICATION, Category.COPY_D2D, Category.ELEMENTWISE, Category.HOST)
    cures = (Cure.COMMUNICATE_LESS,)
    usual_realisation = 0.15

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        today = self.neutral(workload)
        changes: list[Choice] = [
            {"bucket_views": True},
            {"static_graph": True, "find_unused": False},
            {"static_graph": True, "find_unused": False, "bucket_views": True},
            {"find_unused": False},
            {"bucket_cap_mb": 25, "first_bucket_mb": 25},
            {},
        ]
        changes[-2:-2] = [{"bucket_cap_mb": cap, "first_bucket_mb": 1} for cap in CAPS_MB]
        return each_once(today, changes)

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice == self.neutral(workload):
            return Supported()
        alone = needs_ranks(environment)
        if isinstance(alone, Unsupported):
            return alone
        cap, first = int(choice["bucket_cap_mb"] or 0), int(choice["first_bucket_mb"] or 0)
        if first > cap:
            return Unsupported(f"first_bucket_mb ({first}) must not exceed bucket_cap_mb ({cap})")
        unused = workload.model.num_unused_parameters
        if unused and not choice["find_unused"] and not choice["static_graph"]:
            return Unsupported(f"requires find_unused or static_graph: {unused} parameters get no gradient")
        if choice["static_graph"] and workload.custom_step:
            return Unsupported(
                "static_graph is not supported with a custom training_step, whose autograd graph "
                "may change from step to step"
            )
        return self._makes_other_buckets(choice, workload)

    def _makes_other_buckets(self, choice: Choice, workload: WorkloadFacts) -> Support:
        """Check that the bucket sizes of a choice group this model's gradients differently from today's sizes, and from
        the other sizes that are tried.
        """
        today, total = self.neutral(workload), workload.model.parameter_bytes / MIB
        if any(choice[name] != today[name] for name in self.defaults if name not in SIZES):
            return Supported()
        if all(total <= int(c["first_bucket_mb"] or 0) for c in (choice, today)):
            return Unsupported("no effect: all gradients already fit into the first bucket")
        cap, others = int(choice["bucket_cap_mb"] or 0), (*CAPS_MB, int(today["bucket_cap_mb"] or 0))
        enough = min((size for size in others if total <= size), default=cap)
        if cap > enough:
            return Unsupported(f"no effect: all {total:.1f} MiB of gradients already fit into buckets of {enough} MiB")
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        cap, first = choice["bucket_cap_mb"], choice["first_bucket_mb"]
        if any(choice[name] != self.defaults[name] for name in SIZES):
            plan.wrap.ddp["bucket_cap_mb_list"] = [first, cap]  # of the first bucket, and of all others
        for name, argument in (
            ("static_graph", "static_graph"),
            ("bucket_views", "gradient_as_bucket_view"),
            ("find_unused", "find_unused_parameters"),
        ):
            if choice[name]:
                plan.wrap.ddp[argument] = True

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        return {name: choice[name] for name in ("first_bucket_mb", "bucket_cap_mb")}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: exposed communication (without the last bucket if the links are known), copies of
        gradients that become views of their bucket, and the search for unused parameters.
        """
        communication = {Category.COMMUNICATION: self._saved_communication(situation, choice)}
        return jointly(communication, self._saved_beside(situation, choice))

    def _saved_beside(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings outside communication."""
        today = situation.choices[self.name]
        others: list[Category] = []
        if choice["bucket_views"] != today["bucket_views"]:
            others += [Category.COPY_D2D, Category.ELEMENTWISE]
        if today["find_unused"] and not choice["find_unused"]:
            others += [Category.HOST, Category.LAUNCH_LATENCY]
        return without(situation, *others)

    def _saved_communication(self, situation: Situation, choice: Choice) -> float:
        """Return the maximum saving of communication. With other bucket sizes, reductions may start earlier, so that
        only the last bucket's reduction stays exposed.
        """
        now, then = reduction(situation), reduction(situation, **self.exchange(choice))
        if now is None or then is None:
            return removable(situation, Category.COMMUNICATION)
        hidden = Reduction(total_ns=then.last_ns, last_ns=then.last_ns)
        return most_saved(situation, now, hidden)

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving of other bucket sizes, from fewer calls or a shorter last bucket. The number of
        bytes sent stays the same.
        """
        now, then = reduction(situation), reduction(situation, **self.exchange(choice))
        if now is None or then is None:
            return None
        return saved(situation, now, then) + self.usual_realisation * total(self._saved_beside(situation, choice))

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return the running DDP's description of its buckets and flags."""
        from torch.nn.parallel import DistributedDataParallel

        ddp = job.model
        if not isinstance(ddp, DistributedDataParallel):
            return {}
        logged = ddp._get_ddp_logging_data()
        caps = ddp.bucket_bytes_cap_list or [MIB, ddp.bucket_bytes_cap]
        sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
        return {
            "bucket_cap_mb": caps[-1] // MIB,
            "first_bucket_mb": caps[0] // MIB,
            "static_graph": bool(logged.get("static_graph")),
            "bucket_views": bool(logged.get("gradient_as_bucket_view")),
            "find_unused": bool(logged.get("find_unused_parameters")),
            "buckets": [int(size) for size in str(sizes).split(",") if size.strip()],
        }

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        if "buckets" not in evidence:
            plain = choice == self.defaults
            return Effect(strategy=self.name, took=plain, detail="no DDP" if plain else "the job does not use DDP")
        effect = super().took_effect(evidence, choice)
        if not effect.took:
            return effect
        buckets = evidence["buckets"]
        sizes = ", ".join(f"{size / MIB:.1f}" for size in buckets[:8])
        detail = f"{len(buckets)} bucket{'s' * (len(buckets) != 1)} of {sizes} MiB"
        return Effect(strategy=self.name, took=True, detail=detail)
