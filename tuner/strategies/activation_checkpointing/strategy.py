"""activation_checkpointing: recompute activations in the backward pass instead of keeping them.

Mechanism: a checkpointed block keeps only its input and runs its forward pass again during the backward pass. `every`
says that every k-th block is checkpointed; 1 checkpoints all. `save` keeps what is expensive to recompute: the results
of `attention`, or of matrix `products` (attention and convolutions included); the rest is recomputed.

Helps: memory, which can be spent on larger micro-batches or on running at all. Hurts: time, by up to the cost of one
forward pass; with `save` by much less of it, for less memory saved.

Numerics: `exact`. The recomputation sees the same random numbers; batch normalisation does not update its running
statistics a second time.

Sources: https://docs.pytorch.org/docs/stable/checkpoint.html (`create_selective_checkpoint_contexts`); Chen et al.,
"Training Deep Nets with Sublinear Memory Cost" (2016), arXiv 1604.06174; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), arXiv 2205.05198 (selective)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, part_of, without
from steptune.tuner.costs.categories import Category
from steptune.tuner.records import Choice, Effect, Environment, Numerics, WorkloadFacts
from steptune.tuner.strategies.activation_checkpointing.choice import ActivationCheckpointingSetting
from steptune.tuner.strategies.activation_checkpointing.conflicts import DROPPED
from steptune.tuner.strategies.api import Strategy, Support, Supported, Unsupported
from steptune.tuner.strategies.cures import Cure

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload

_MARK = "_steptune_checkpointed"
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm")

RECOMPUTED = 0.5
"""Maximum share of a step that recomputation takes, reached if every block is recomputed."""


class ActivationCheckpointing(Strategy):
    setting = ActivationCheckpointingSetting
    dropped = DROPPED
    summary = (
        "recomputation of every k-th block's activations in the backward pass; results of expensive operators can "
        "be kept"
    )
    needs_workload = "the model's repeated blocks are known only from Workload.blocks"
    attacks = ()
    cures = (
        Cure.RECOMPUTE_LESS,
        Cure.RECOMPUTE_MORE,
    )
    recompiles = True
    usual_realisation = 0.5
    memory = True

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        attention: tuple[Choice, ...] = ({"every": 1, "save": "attention"},) if workload.model.uses_attention else ()
        return (
            {"every": 1, "save": "products"},
            {"every": 2, "save": None},
            *attention,
            {"every": 1, "save": None},
            {"every": None, "save": None},
        )

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["every"] is not None and workload.model.num_blocks < int(choice["every"]):
            return Unsupported(
                f"requires at least {choice['every']} repeated blocks, got {workload.model.num_blocks}: name "
                "them in Workload.blocks"
            )
        if choice["every"] is not None and workload.model.block_state:
            return Unsupported(
                f"the model's blocks change {workload.model.block_state} in the forward pass, and recomputation "
                "would change it again: move this state out of the blocks"
            )
        return Supported()

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.EXACT

    def contribute(self, plan: Plan, choice: Choice) -> None:
        every, save = choice["every"], choice["save"]
        if every is None:
            return

        def checkpoint_blocks(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
            for number, block in enumerate(workload.blocks(model)):
                if number % int(every) == 0:
                    checkpointed(block, None if save is None else str(save))
            return model

        plan.checkpointing.append(checkpoint_blocks)

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        # Recomputing less than today saves at most the recomputation: a forward pass of the blocks, which the step
        # contains a second time anyway. So it is half of the step at most, and usually a quarter.
        current, wanted = situation.choices[self.name]["every"], choice["every"]
        if current is None:
            return {}
        left = 0.0 if wanted is None or choice["save"] is not None else 1 / int(wanted)
        return part_of(without(situation, *Category), max(0.0, RECOMPUTED * (1 / int(current) - left)))

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        marks = [getattr(module, _MARK) for module in job.model.modules() if hasattr(module, _MARK)]
        return {"checkpointed_blocks": len(marks), "saves": sorted(set(marks))}

    def took_effect(self, evidence: Mapping[str, Any], choice: Choice) -> Effect:
        marked, saves = evidence.get("checkpointed_blocks", 0), evidence.get("saves", [])
        wanted = [] if choice["every"] is None else [str(choice["save"])]
        kept = f", but their {saves[0]}" if saves and saves != ["None"] else ""
        return Effect(strategy=self.name, took=saves == wanted, detail=f"{marked} blocks are recomputed{kept}")


def checkpointed(block: torch.nn.Module, save: str | None = None) -> None:
    """Make a block, in place, recompute its activations in the backward pass; its state keys stay the same.

    Args:
        save: Results that are kept all the same: None, "attention" or "products".
    """
    from torch.utils.checkpoint import checkpoint

    if save is not None:
        _keep_results(block)
    forward = block.forward
    arguments: dict[str, Any] = {"use_reentrant": False}
    if _has_statistics(block):
        arguments["context_fn"] = partial(_contexts_freezing_statistics, block, save)
    elif save is not None:
        arguments["context_fn"] = partial(_contexts_that_save, save)

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **arguments, **kwargs)

    block.forward = recomputing
    setattr(block, _MARK, str(save))


def _keep_results(block: torch.nn.Module) -> None:
    """Switch off in-place operation of a block's modules, because it would overwrite the results that are kept."""
    for module in block.modules():
        if getattr(module, "inplace", False) is True:
            setattr(module, "inplace", False)  # noqa: B010 (a module of the user's has it, as far as types tell)


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _contexts_that_save(save: str | None) -> Contexts:
    """Return the contexts of the forward pass and of the recomputation, which save chosen results."""
    if save is None:
        return nullcontext(), nullcontext()
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    first, second = create_selective_checkpoint_contexts(partial(_policy, saved_operators(save)))
    return first, second


def _contexts_freezing_statistics(block: torch.nn.Module, save: str | None) -> Contexts:
    first, second = _contexts_that_save(save)

    @contextmanager
    def recomputation() -> Iterator[None]:
        with _frozen_statistics(block), second:
            yield

    return first, recomputation()


def saved_operators(save: str) -> frozenset[str]:
    """Return the names in `torch.ops.aten` of the operators whose results are saved."""
    return frozenset(_ATTENTION if save == "attention" else (*_ATTENTION, *_PRODUCTS))


def _policy(saved: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Choose the operators whose results are saved. Operators that draw random numbers are recomputed, so that later
    ones draw the same numbers again.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    namespace, _, name = operator._schema.name.partition("::")
    if namespace != "aten" or name not in saved or _argument(operator, "dropout_p", args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _argument(operator: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the value of an operator's argument in one call; None if the operator has no argument of this name."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[place] if place < len(args) else argument.default_value)
    return None


def _norms_with_statistics(block: torch.nn.Module) -> list[Any]:
    import torch

    return [m for m in block.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase) and m.track_running_stats]


def _has_statistics(block: torch.nn.Module) -> bool:
    return bool(_norms_with_statistics(block))


@contextmanager
def _frozen_statistics(block: torch.nn.Module) -> Iterator[None]:
    """Normalise with the batch's statistics but leave the running statistics unchanged."""
    norms = _norms_with_statistics(block)
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
