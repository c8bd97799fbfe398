"""sharding: how parameters, gradients and optimizer states are sharded across the ranks.

Mechanism: `ddp` keeps everything on every rank. `zero1` keeps the optimizer's states of each parameter on one rank,
which sends its update to the others (`ZeroRedundancyOptimizer`). FSDP2 (`fully_shard`) keeps a part of every parameter,
gradient and state on each rank, gathers a unit's parameters just before they are used, and scatters the reduced
gradients: `full` frees them after the forward pass and gathers them again in the backward pass, `grad_op` keeps them
until then, `hybrid` shards inside every host and reduces between hosts (freeing them or not: `reshard`). Units are the
whole model (`root`), its repeated blocks (`block`), or modules of at least `min_num_params` parameters (`size`).
`prefetch` and `backward_prefetch` say how many units are gathered ahead, forward and backward. `cpu_offload` keeps
parts of parameters, gradients and states in the CPU's memory and updates them there. `ignored` leaves normalisation
layers and routers out: whole on every rank, their gradients averaged in one all-reduce. With micro-batches
`reduce_each` False reduces the gradients of all of them at once.

Helps: memory, and with it larger micro-batches; the update takes a share of its time on each rank. Hurts: full sharding
sends half as much again as DDP. With few parameters in a unit latency dominates; one unit for the whole model hides
nothing. Offloading sends parameters and gradients over PCIe, and a CPU updates slowly. Gradients that are not reduced
after every micro-batch are kept whole on every rank.

Numerics: `rounding`. Gradients are reduced in another order; dtypes stay with `precision`.

Sources: Rajbhandari et al., "ZeRO" (2019), arXiv 1910.02054; Zhao et al., "PyTorch FSDP" (2023), arXiv 2304.11277;
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, jointly, part_of, total, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.costs.reduction import likely_saved, reduction
from steptune.tuner.network.exchange import SHARDED
from steptune.tuner.records import Choice, Effect, Environment, Numerics, Scalar, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, needs_ranks
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.sharding.choice import ShardingSetting
from steptune.tuner.strategies.sharding.conflicts import CONFLICTS, DROPPED
from steptune.tuner.training.flat_parameters import ELEMENT_WISE

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

SHOWN = ("prefetch", "backward_prefetch", "cpu_offload", "reduce_each")
"""Parameters of the strategy that the running job reports exactly as they were set."""
SIZES = (1_000_000, 10_000_000, 100_000_000)
"""Minimum numbers of parameters per unit that are tried; the last is FSDP's default."""


def unit_key(choice: Mapping[str, Scalar]) -> str:
    """Return the key in `ModelFacts.shard_units` for the units that FSDP gathers with this choice."""
    return f"size {choice['min_num_params']}" if choice["wrap"] == "size" else str(choice["wrap"])


class Sharding(Strategy):
    setting = ShardingSetting
    conflicts = CONFLICTS
    dropped = DROPPED
    summary = "DDP, ZeRO-1 or FSDP (full, grad_op or hybrid), and the units that FSDP gathers"
    needs_workload = (
        "the model must be wrapped before its optimizer is created; only Workload.model makes that possible"
    )
    attacks = (Category.COMMUNICATION, Category.OPTIMIZER, Category.OPTIMIZER_HOST)
    cures = (
        Cure.COMMUNICATE_LESS,
        Cure.HOLD_LESS,
    )
    usual_realisation = 0.15
    recompiles = True
    memory = True

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        smaller = [size for size in SIZES if size < workload.model.num_parameters]
        return (
            self.completed({"mode": "grad_op", "wrap": "block"}),
            self.completed({"mode": "full", "wrap": "block"}),
            self.completed({"mode": "hybrid", "wrap": "block", "reshard": False}),
            self.completed({"mode": "hybrid", "wrap": "block"}),
            self.completed({"mode": "zero1"}),
            self.completed({"mode": "grad_op", "wrap": "block", "prefetch": 2}),
            self.completed({"mode": "full", "wrap": "block", "prefetch": 2, "backward_prefetch": 2}),
            *(self.completed({"mode": mode, "wrap": "block", "ignored": "norms"}) for mode in ("grad_op", "full")),
            *(self.completed({"mode": mode, "wrap": "block", "reduce_each": False}) for mode in ("grad_op", "full")),
            *(self.completed({"mode": "full", "wrap": "size", "min_num_params": size}) for size in smaller),
            self.completed({"mode": "grad_op"}),
            self.completed({"mode": "full"}),
            self.completed({"mode": "full", "wrap": "block", "cpu_offload": True}),
            self.completed({"mode": "ddp"}),
        )

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice == self.neutral(workload):
            return Supported()
        alone = needs_ranks(environment)
        if isinstance(alone, Unsupported) or choice["mode"] == "ddp":
            return alone
        optimizer = workload.optimizer
        if workload.custom_step:
            return Unsupported(
                "not supported with a custom training_step, which would see sharded parameters or states"
            )
        if not optimizer.module.startswith("torch.optim") or optimizer.name not in ELEMENT_WISE:
            return Unsupported(
                f"requires an element-wise optimizer from torch.optim; {optimizer.name} is not known to be one"
            )
        if choice["mode"] == "zero1":
            return Supported()
        return self._supports_fsdp(choice, environment, workload)

    def _supports_fsdp(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["mode"] == "full" and not choice["reshard"]:
            return Unsupported(
                "mode full requires reshard=True; use mode grad_op to keep parameters gathered until the backward pass"
            )
        if choice["wrap"] == "block" and workload.model.num_blocks < 2:
            return Unsupported(
                f"requires at least 2 repeated blocks, got {workload.model.num_blocks}: name them in Workload.blocks"
            )
        depth = max(int(choice["prefetch"] or 1), int(choice["backward_prefetch"] or 1))
        if depth > 1 and choice["wrap"] != "block":
            return Unsupported("prefetching requires wrap=block: the order of other units is unknown")
        if 1 < depth >= workload.model.num_blocks:
            return Unsupported(
                f"prefetching {depth} blocks ahead requires at least {depth + 1} repeated blocks, got "
                f"{workload.model.num_blocks}"
            )
        if choice["cpu_offload"] and environment.hardware.device_kind == "cpu":
            return Unsupported("no effect: parameters are already in CPU memory")
        if choice["cpu_offload"] and choice["ignored"]:
            return Unsupported("ignored parameters are not supported with CPU offload, because they stay on the device")
        if choice["mode"] != "hybrid":
            return Supported()
        ranks, hosts = environment.num_ranks, environment.num_hosts
        if hosts == 1:
            return Unsupported(
                "hybrid sharding requires at least 2 hosts, got 1: on one host it is the same as full sharding"
            )
        if ranks % hosts or ranks == hosts:
            return Unsupported(
                f"hybrid sharding requires at least 2 ranks on every host, and the same number on each: {ranks} "
                f"ranks on {hosts} hosts"
            )
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["mode"] == "ddp":
            return
        from steptune.tuner.training.plan import ShardingArguments

        plan.wrap.sharding = ShardingArguments(
            mode=str(choice["mode"]),
            wrap=str(choice["wrap"]),
            min_num_params=int(choice["min_num_params"] or 0),
            reshard=bool(choice["reshard"]),
            prefetch=int(choice["prefetch"] or 1),
            backward_prefetch=int(choice["backward_prefetch"] or 1),
            cpu_offload=bool(choice["cpu_offload"]),
            ignored=None if choice["ignored"] is None else str(choice["ignored"]),
            reduce_each=bool(choice["reduce_each"]),
        )

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        fields = {name: choice[name] for name in ("mode", "reshard", "wrap", "min_num_params", "reduce_each")}
        return {**fields, "ignored": choice["ignored"] is not None}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: exposed communication, and the part of the update that other ranks do."""
        return jointly(without(situation, Category.COMMUNICATION), _saved_beside(situation, choice))

    def expected(self, situation: Situation, choice: Choice) -> float | None:
        """Return the expected saving: communication time saved, computed from the bytes sent, and a usual share of the
        other savings; None if the cost of communication is unknown. Offloading to the CPU saves only memory, because
        data is copied there and back.
        """
        if choice["cpu_offload"]:
            return 0.0
        now, then = reduction(situation), reduction(situation, **self.exchange(choice))
        if now is None or then is None:
            return None
        return likely_saved(situation, now, then) + self.usual_realisation * total(_saved_beside(situation, choice))

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return FSDP's description of the model, or the share of the optimizer's states that this rank holds."""
        from steptune.tuner.training.sharding import description_of, is_sharded, is_zero_redundancy, num_held

        if job.plan.wrap.sharding is None:
            return {"mode": "ddp"}
        if is_sharded(job.model):
            return {**description_of(job.model), "reduce_each": job.plan.wrap.sharding.reduce_each}
        if not is_zero_redundancy(job.optimizer):
            return {"mode": "ddp"}
        return {"mode": "zero1", "held": num_held(job.optimizer), "parameters": len(job.parameters())}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        mode = evidence.get("mode")
        if mode is None:
            mode = "hybrid" if evidence.get("hybrid") else "full" if evidence.get("frees") else "grad_op"
        took, detail = mode == choice["mode"], f"the job runs in mode {mode}"
        if took and mode == "zero1":
            held, parameters = evidence.get("held", 0), evidence.get("parameters", 0)
            took, detail = held < parameters, f"a rank holds the optimizer states of {held} of {parameters} parameters"
        if took and mode in SHARDED:
            units, share = evidence.get("units", 0), evidence.get("share", 1.0)
            frees = ShardingSetting.of(choice).frees
            alone = choice["wrap"] == "root"
            took = (
                share < 1.0
                and evidence.get("frees") == frees
                and all(evidence.get(name) == choice[name] for name in SHOWN)
                and bool(evidence.get("ignored")) == (choice["ignored"] is not None)
                and (units == 1 or not alone)
                and (units > 1 or alone)
            )
            detail = (
                f"{units} FSDP units, sharded so that each rank holds {share:.0%} of the parameters; "
                f"{evidence.get('prefetch')} units prefetched"
            )
            detail += f", {evidence['ignored']} tensors excluded from sharding" if evidence.get("ignored") else ""
            detail += ", offloaded to CPU memory" if evidence.get("cpu_offload") else ""
        return Effect(strategy=self.name, took=took, detail=detail)


def _saved_beside(situation: Situation, choice: Choice) -> Savings:
    """Return the maximum savings outside communication: the update of other ranks' parameters, and copies of gradients
    into buckets.
    """
    shared = 1 - 1 / max(1, situation.environment.num_ranks)
    update = part_of(without(situation, Category.OPTIMIZER, Category.OPTIMIZER_HOST), shared)
    return jointly(update, without(situation, Category.COPY_D2D) if choice["mode"] in SHARDED else {})
