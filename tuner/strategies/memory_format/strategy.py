"""memory_format: the order of the dimensions of images, and of tokens, in memory.

Mechanism: `channels_last` keeps the channels of a pixel together (NHWC), the order that tensor cores and oneDNN's
convolutions want; with the default order they transpose first. `batch_second` keeps a stack of attention blocks in
the order in which `nn.MultiheadAttention` computes (tokens, batch, width), where it would transpose in every block.

Helps: convolutional networks; transformers of `nn.MultiheadAttention` with `batch_first=True`. Hurts: layers that
fall back to the default order, each with a copy.

Numerics: `rounding` (other algorithms, which add in another order).

Sources: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html ; pycls, vit.py (sequence first),
https://github.com/facebookresearch/pycls
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.costs.bounds import Savings, Situation, at_roofline, jointly, without
from steptune.tuner.costs.categories import COMPUTE, Category
from steptune.tuner.records import Choice, Environment, Numerics, Scalar, ScriptFacts, WorkloadFacts
from steptune.tuner.strategies.api import NeedsWorkload, Outside, Strategy, Support, Supported, Unsupported, Way
from steptune.tuner.strategies.cures import Cure
from steptune.tuner.strategies.memory_format.choice import MemoryFormatSetting

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.job import TrainingJob
    from steptune.tuner.training.plan import Plan
    from steptune.tuner.workloads.workload import Workload


class MemoryFormat(Strategy):
    setting = MemoryFormatSetting
    summary = "contiguous or channels_last images; attention blocks with the batch as second dimension"
    attacks = COMPUTE
    cures = (
        Cure.CHOOSE_LAYOUT,
        Cure.TUNE_COMPUTE,
    )
    touches = (*COMPUTE, Category.COPY_D2D)
    recompiles = True
    usual_realisation = 0.3

    def choices(self, environment: Environment, workload: WorkloadFacts) -> tuple[Choice, ...]:
        attends = "MultiheadAttention" in workload.model.module_types
        tokens: tuple[Choice, ...] = ({"layout": "contiguous", "batch_second": True},) if attends else ()
        return (
            {"layout": "channels_last", "batch_second": False},
            *tokens,
            {"layout": "contiguous", "batch_second": False},
        )

    def supports(self, choice: Choice, environment: Environment, workload: WorkloadFacts) -> Support:
        if choice["layout"] != self.defaults["layout"] and not workload.model.module_types.get("Conv2d"):
            return Unsupported("requires a Conv2d layer; the model has none")
        if choice["batch_second"] and not workload.model.can_be_batch_second:
            return Unsupported(
                "requires repeated blocks with nn.MultiheadAttention (batch_first=True); their other modules must "
                "come from torch and process each token independently"
            )
        return Supported()

    def likely_part(self, workload: WorkloadFacts) -> float:
        """Return the share of the maximum saving that is usually realised. It is small for a model whose only
        convolution cuts images into patches, because the other layers do not benefit from the layout.
        """
        single = workload.model.module_types.get("Conv2d", 0) == 1
        return 0.02 if single and not workload.model.can_be_batch_second else self.usual_realisation

    def numerics(self, choice: Choice) -> Numerics:
        return Numerics.ROUNDING

    def contribute(self, plan: Plan, choice: Choice) -> None:
        if choice["layout"] == "channels_last":
            plan.model.append(to_channels_last)
            plan.batch.append(images_to_channels_last)
        if choice["batch_second"]:
            plan.model.append(blocks_to_batch_second)

    def outside(self, choice: Choice, script: ScriptFacts) -> Outside | NeedsWorkload:
        if choice["batch_second"]:
            return NeedsWorkload("the model's repeated blocks are known only from Workload.blocks")
        if script.wrappers:
            return NeedsWorkload(f"{script.wrappers[0]} fixes the layout of the parameters before the first step")
        if not script.models:
            return NeedsWorkload(
                "the script's loop never calls a trained module as a whole, only its methods or submodules"
            )
        changes: dict[str, Scalar] = {"channels_last": choice["layout"] == "channels_last"}
        words = ".to(memory_format=torch.channels_last) on model and images"
        return Outside(way=Way.FORK, changes=changes, words=words, at="model")

    def savings(self, situation: Situation, choice: Choice) -> Savings:
        rest = without(situation, Category.NORMALISATION, Category.ELEMENTWISE, Category.COPY_D2D, Category.REDUCTION)
        return jointly(at_roofline(situation, Category.MATMUL), rest)

    def evidence(self, job: TrainingJob) -> dict[str, Any]:
        import torch

        from steptune.tuner.training.batch_second import is_batch_second

        second = {"batch_second": is_batch_second(job.model)}
        # A weight with one input channel or one pixel is laid out alike in both orders.
        convolutions = [m.weight for m in job.model.modules() if isinstance(m, torch.nn.Conv2d)]
        weights = [w for w in convolutions if w.shape[1] > 1 and w.shape[2] * w.shape[3] > 1]
        if not weights:
            return second
        last = all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
        return {**second, "layout": "channels_last" if last else "contiguous"}


def to_channels_last(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
    """Convert parameters and buffers of rank four to NHWC order."""
    import torch

    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    return model


def images_to_channels_last(batch: Any) -> Any:
    """Convert floating-point tensors of rank four to NHWC order."""
    import torch

    from steptune.tuner.training.structure import map_structure

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 4 and leaf.is_floating_point():
            return leaf.contiguous(memory_format=torch.channels_last)
        return leaf

    return map_structure(convert, batch)


def blocks_to_batch_second(model: torch.nn.Module, workload: Workload) -> torch.nn.Module:
    """Convert the repeated blocks to the (tokens, batch, width) order of `nn.MultiheadAttention`."""
    from steptune.tuner.training.batch_second import to_batch_second

    to_batch_second(workload.blocks(model))
    return model
