"""Reducing gradients with fewer bytes: communication hooks of DDP, one technique a file.

`attach` is the only entry. What a technique sends and what it replaces is counted, so that a job can show its effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import UnsupportedHere
from tuner.training.compression.base import Compression
from tuner.training.compression.lane import Lane

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from tuner.training.plan import CompressionArguments


def attach(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    arguments: CompressionArguments,
    max_grad_norm: float | None,
) -> None:
    """Gives DDP the hook of the technique; after the optimizer, whose momentum one of them takes over.

    Raises:
        UnsupportedHere: The optimizer or its scheduler is not one that the technique is defined for.
    """
    if arguments.method == "dgc" and getattr(scheduler, "cycle_momentum", False):
        raise UnsupportedHere(
            f"deep gradient compression takes over the momentum, which {type(scheduler).__name__} changes: "
            "give it cycle_momentum=False"
        )
    state = build(optimizer, arguments, max_grad_norm, Lane(model.device))
    model.register_comm_hook(state, lambda state, bucket: state.reduce(bucket))


def build(
    optimizer: torch.optim.Optimizer, arguments: CompressionArguments, max_grad_norm: float | None, lane: Lane
) -> Compression:
    """The technique, by its name."""
    match arguments.method:
        case "fp16" | "bf16":
            from tuner.training.compression.sixteen_bit import SixteenBit

            return SixteenBit(arguments.method)
        case "int8":
            from tuner.training.compression.int8 import Int8

            return Int8(lane)
        case "one_bit":
            from tuner.training.compression.one_bit import OneBit

            return OneBit(lane)
        case "powersgd":
            from tuner.training.compression.powersgd import PowerSgd

            return PowerSgd(lane, arguments.rank)
        case "dgc":
            from tuner.training.compression.deep_gradient import DeepGradient

            return DeepGradient(lane, optimizer, arguments.ratio, arguments.warm_up_steps, max_grad_norm)
    raise AssertionError(f"no compression is called {arguments.method!r}")


def compression_of(model: torch.nn.Module) -> Compression | None:
    """What reduces the gradients of a wrapped model, where that compresses them."""
    hooks = getattr(model, "_comm_hooks", ())
    return next((state for _, state in hooks if isinstance(state, Compression)), None)
