"""parallel_mesh: one model sharded across several ranks, by matmuls, layers or experts, in addition to data
parallelism.

Mechanism: the ranks are a grid of the degrees below; those left over are data-parallel replicas. `tensor`: each rank
has some heads of every attention and some inner columns of every feed-forward layer, and activations are summed over
the ranks twice a block, forward and backward. `pipeline`: each rank has some blocks, cut where their measured times
and memory say, and passes micro-batches on, in the order of the `schedule`. `expert`: each rank has some experts of
every mixture, to which tokens go by all-to-all.

Helps: memory, where a model and its optimizer's states fit on no single device; large models at small batches. Hurts:
tensor parallelism sends activations in every block, which needs the links inside a host; with d ranks and m
micro-batches a pipeline loses (d-1)/(m+d-1) of a step to filling and draining.

Numerics: `rounding`. The same products, added in another order; sums over ranks are made in FP32.

Sources: Shoeybi et al., "Megatron-LM" (2019), arXiv 1909.08053; Huang et al., "GPipe" (2018), arXiv 1811.06965;
Narayanan et al. (2021), arXiv 2104.04473; https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, jointly, part_of, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported, needs_ranks
from steptune.tuner.strategies.parallel_mesh.choice import AXES, ParallelMeshSetting
from steptune.tuner.strategies.parallel_mesh.conflicts import CONFLICTS, DROPPED
from steptune.tuner.training.flat_parameters import ELEMENT_WISE

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan

SCHEDULES = ("1f1b", "gpipe", "interleaved")
PER_STAGE = (4, 2, 1)
"""Numbers of micro-batches per pipeline rank that are tried. The more micro-batches, the smaller the share of the step
in which the pipeline fills and drains.
"""


class ParallelMesh(Strategy):
    setting = ParallelMeshSetting
    conflicts = CONFLICTS
    dropped = DROPPED
    summary = "one model over several ranks: pipeline, tensor or expert parallelism"
    needs_workload = "Steptune must assign the parts of the model to ranks"
    attacks = (Category.COMMUNICATION, Category.PIPELINE_BUBBLE, Category.OPTIMIZER, Category.OPTIMIZER_HOST)
    usual_realisation = 0.1
    recompiles = True
    memory = True

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        ranks = environment.num_ranks
        inside = ranks // max(1, environment.num_hosts)
        units = workload.model.tensor_units
        tensor = [degree for degree in _divisors(inside) if degree > 1 and units and units % degree == 0]
        pipeline = [degree for degree in _divisors(ranks) if 1 < degree <= workload.model.num_blocks]
        experts = workload.model.num_movable_experts
        found: list[Choice] = [{"tensor": degree} for degree in tensor]
        found += [{"expert": degree} for degree in _divisors(ranks) if degree > 1 and experts and not experts % degree]
        found += [choice for degree in pipeline for choice in self._pipelines(degree, ranks, workload)]
        found += [
            {**choice, "tensor": shared}
            for degree in pipeline
            for shared in tensor
            if degree * shared <= ranks and ranks % (degree * shared) == 0
            for choice in self._pipelines(degree, ranks // shared, workload)[:1]
        ]
        return tuple(self.completed(choice) for choice in [*found, {}])

    def _pipelines(self, degree: int, ranks: int, workload: WorkloadFacts) -> list[Choice]:
        """Return choices of every schedule, with numbers of micro-batches that divide a replica's batch."""
        batch = workload.global_batch * degree // ranks
        counts = [degree * times for times in PER_STAGE if batch % (degree * times) == 0][:2]
        found: list[Choice] = [{"pipeline": degree, "schedule": "1f1b", "micro_batches": count} for count in counts]
        for schedule in SCHEDULES[1:]:
            deep = workload.model.num_blocks >= 2 * degree or schedule == "gpipe"
            found += [
                {"pipeline": degree, "schedule": schedule, "micro_batches": count} for count in counts[:1] if deep
            ]
        return found

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice == self.neutral(workload):
            return Supported()
        alone = needs_ranks(environment)
        if isinstance(alone, Unsupported) or ParallelMeshSetting.of(choice).model_ranks == 1:
            return alone
        ranks, needed = environment.num_ranks, ParallelMeshSetting.of(choice).model_ranks
        if ranks % needed:
            return Unsupported(f"the number of ranks ({ranks}) must be a multiple of {needed}")
        if workload.custom_step:
            return Unsupported("not supported with a custom training_step, which would see only a part of the model")
        if not workload.batch_splittable or workload.varying_shapes:
            return Unsupported("requires splittable batches of one shape, because ranks concatenate their batches")
        if workload.model.has_batch_statistics:
            return Unsupported(
                "not supported with batch normalisation: its statistics would be computed over batches of another size"
            )
        optimizer = workload.optimizer
        if not optimizer.module.startswith("torch.optim") or optimizer.name not in ELEMENT_WISE:
            return Unsupported(
                f"requires an element-wise optimizer from torch.optim; {optimizer.name} is not known to be one"
            )
        support = self._supports_pipeline(choice, environment, workload)
        if isinstance(support, Unsupported):
            return support
        support = self._supports_experts(choice, workload)
        if isinstance(support, Unsupported):
            return support
        return self._supports_tensor(int(choice["tensor"] or 1), environment, workload)

    def _supports_experts(self, choice: Choice, workload: WorkloadFacts) -> Support:
        degree, experts = int(choice["expert"] or 1), workload.model.num_movable_experts
        if degree == 1:
            return Supported()
        if ParallelMeshSetting.of(choice).model_ranks > degree:
            return Unsupported("expert parallelism can be combined with data parallelism only")
        if not experts:
            return Unsupported("requires mixture-of-experts layers whose experts can be sharded")
        if experts % degree:
            return Unsupported(f"{experts} experts cannot be divided evenly among {degree} ranks")
        return Supported()

    def _supports_pipeline(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        degree, pieces = int(choice["pipeline"] or 1), int(choice["micro_batches"] or 1)
        if degree == 1:
            return Supported()
        chunks = 2 if choice["schedule"] == "interleaved" else 1
        blocks = workload.model.num_blocks
        if blocks < degree * chunks:
            return Unsupported(
                f"requires at least {degree * chunks} repeated blocks for {degree * chunks} "
                f"pipeline stages, got {blocks}"
            )
        if workload.model.chain_refusal:
            return Unsupported(f"the model cannot be cut between its blocks: {workload.model.chain_refusal}")
        if pieces < degree:
            return Unsupported(
                f"requires at least {degree} micro-batches to keep {degree} pipeline ranks busy, got {pieces}"
            )
        if chunks > 1 and pieces % degree:
            return Unsupported(f"interleaved stages require a multiple of {degree} micro-batches, got {pieces}")
        batch = workload.global_batch * ParallelMeshSetting.of(choice).model_ranks // environment.num_ranks
        if batch % pieces:
            return Unsupported(f"a replica's batch of {batch} cannot be divided evenly into {pieces} micro-batches")
        return Supported()

    def _supports_tensor(self, degree: int, environment: Environment, workload: WorkloadFacts) -> Support:
        if degree == 1:
            return Supported()
        units = workload.model.tensor_units
        if not units:
            return Unsupported(f"the model's matmuls cannot be sharded: {workload.model.tensor_refusal}")
        if units % degree:
            return Unsupported(f"{units} heads or inner columns cannot be divided evenly among {degree} ranks")
        inside = environment.num_ranks // max(1, environment.num_hosts)
        if degree > inside or inside % degree:
            return Unsupported(
                f"the number of ranks on each host ({inside}) must be a multiple of the "
                f"tensor-parallel degree ({degree})"
            )
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if ParallelMeshSetting.of(choice).model_ranks == 1:
            return
        from steptune.tuner.training.plan import MeshArguments

        plan.wrap.mesh = MeshArguments(
            pipeline=int(choice["pipeline"] or 1),
            tensor=int(choice["tensor"] or 1),
            expert=int(choice["expert"] or 1),
            schedule=str(choice["schedule"]),
            num_micro_batches=int(choice["micro_batches"] or 1),
        )

    def exchange(self, choice: Choice) -> Mapping[str, Any]:
        return {"model_ranks": ParallelMeshSetting.of(choice).model_ranks}

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        """Return the maximum savings: exposed communication, the time in which pipeline stages wait, and the part of
        the update that other ranks do.
        """
        shared = 1 - 1 / ParallelMeshSetting.of(choice).model_ranks
        update = part_of(without(situation, Category.OPTIMIZER, Category.OPTIMIZER_HOST), shared)
        return jointly(without(situation, Category.COMMUNICATION, Category.PIPELINE_BUBBLE), update)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        """Return the axes of the mesh, and the share of the parameters that this rank holds."""
        from steptune.tuner.training.mesh.mesh import Mesh

        return job.layout.description() if isinstance(job.layout, Mesh) else dict.fromkeys(AXES, 1)

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        effect = super().took_effect(evidence, {axis: choice[axis] for axis in AXES})
        if not effect.took or ParallelMeshSetting.of(choice).model_ranks == 1:
            return effect
        share = evidence.get("share", 1.0)
        return Effect(
            strategy=self.name, took=share < 1.0, detail=f"a rank holds {share:.0%} of the parameters; {_axes(choice)}"
        )


def _axes(choice: Choice) -> str:
    return ", ".join(f"{choice[axis]} {axis}" for axis in AXES if choice[axis] != 1)


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
