"""activation_checkpointing: recompute activations in the backward pass instead of keeping them.

Mechanism: a checkpointed block keeps only its input and runs its forward pass again during the
backward pass. `every` says that every k-th block is checkpointed; 1 checkpoints all.

Helps: memory, which can be spent on larger micro-batches or on running at all. Hurts: time, by up to
the cost of one forward pass.

Numerics: `exact`. The recomputation sees the same random numbers; batch normalisation does not update
its running statistics a second time.

Source: https://docs.pytorch.org/docs/stable/checkpoint.html ; Chen et al., "Training Deep Nets with
Sublinear Memory Cost" (2016), arXiv 1604.06174
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from tuner.profiling.bounds import Situation
from tuner.records import Choice, Effect, Environment, Numerics, Scalar, WorkloadFacts
from tuner.strategies.base import Strategy, Support, Supported, Unsupported

if TYPE_CHECKING:
    import torch

    from tuner.training.job import TrainingJob
    from tuner.training.plan import Plan
    from tuner.workloads.workload import Workload

_MARK = "_steptune_checkpointed"


class ActivationCheckpointing(Strategy):
    name = "activation_checkpointing"
    summary = "recompute every k-th block instead of keeping its activations"
    defaults: ClassVar[Choice] = {"every": None}
    values: ClassVar[Mapping[str, tuple[Scalar | range, ...]]] = {"every": (None, range(1, 1025))}
    attacks = ()
    usual_realisation = 0.5
    memory = True

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        return ({"every": 2}, {"every": 1}, {"every": None})

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["every"] is not None and workload.model.num_blocks < int(choice["every"]):
            return Unsupported(
                f"the model has {workload.model.num_blocks} repeated blocks; name them in Workload.blocks"
            )
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.EXACT

    def contribute(self, plan: Plan, choice: Choice) -> None:
        every = choice["every"]
        if every is None:
            return

        def checkpoint_blocks(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
            for number, block in enumerate(workload.blocks(model)):
                if number % int(every) == 0:
                    checkpointed(block)
            return model

        plan.checkpointing.append(checkpoint_blocks)

    def bound(self, situation: Situation, choice: Choice) -> float:
        # Recomputing less than today saves at most the recomputation: a forward pass of the blocks,
        # which is about a quarter of forward, backward and recomputation together.
        current, wanted = situation.choices[self.name]["every"], choice["every"]
        if current is None:
            return 0.0
        saved = 1 / int(current) - (1 / int(wanted) if wanted else 0.0)
        return max(0.0, 0.25 * saved)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        marked = sum(1 for module in job.model.modules() if getattr(module, _MARK, False))
        return {"checkpointed_blocks": marked}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        marked = evidence.get("checkpointed_blocks", 0)
        took = (marked > 0) == (choice["every"] is not None)
        return Effect(strategy=self.name, took=took, detail=f"{marked} blocks are recomputed")


def checkpointed(block: torch.nn.Module) -> None:
    """Makes a block recompute itself in the backward pass, in place; its state keys stay the same."""
    from torch.utils.checkpoint import checkpoint

    forward = block.forward
    # TorchDynamo compiles a checkpoint without contexts only.
    contexts: dict[str, Any] = {}
    if _statistics(block):
        contexts["context_fn"] = lambda: (nullcontext(), _frozen_statistics(block))

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    block.forward = recomputing
    setattr(block, _MARK, True)


def _statistics(block: torch.nn.Module) -> list[Any]:
    """Modules that keep running statistics."""
    import torch

    return [m for m in block.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase) and m.track_running_stats]


@contextmanager
def _frozen_statistics(block: torch.nn.Module) -> Iterator[None]:
    """Normalises with the batch's statistics but leaves the running ones as they are."""
    norms = _statistics(block)
    saved = [
        (norm, norm.momentum, None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone())
        for norm in norms
    ]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in saved:
            norm.momentum = momentum
            if count is not None:
                norm.num_batches_tracked.copy_(count)
