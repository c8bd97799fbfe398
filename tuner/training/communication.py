"""Communication hook of DDP, created here for all techniques that replace a bucket's own all-reduce.

What a technique sends and what it replaces is counted, so that a job can show its effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.compression.base import Compression, FlatCompression
from steptune.tuner.training.compression.lane import Lane
from steptune.tuner.training.hierarchy import Hierarchy
from steptune.tuner.training.hosts import make_levels, new_group
from steptune.tuner.training.local_sgd import LocalSgd
from steptune.tuner.training.wide_reduction import WideReduction, is_needed

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from steptune.tuner.training.plan import CompressionArguments, WrapArguments
    from steptune.tuner.training.step_hook import StepHook


def attach(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    arguments: WrapArguments,
    max_grad_norm: float | None,
) -> None:
    """Attach the communication hook to DDP. The optimizer must exist already, because one technique takes over its
    momentum.

    Raises:
        UnsupportedError: The technique does not support the optimizer, its scheduler or the hosts.
    """
    import torch.distributed as dist

    wanted = arguments.compression
    if arguments.local_sgd is not None:
        assert wanted is None, "local SGD sends no gradients that could be compressed"
        model.register_comm_hook(LocalSgd(model, arguments.local_sgd), lambda state, bucket: state.reduce(bucket))
        return
    half = arguments.param_dtype
    widens = half is not None and is_needed(dist.get_world_size(model.process_group), half)
    if wanted is None and not arguments.hierarchical:
        if widens:
            model.register_comm_hook(WideReduction(model.process_group), lambda state, bucket: state.reduce(bucket))
        return
    if wanted is not None and wanted.method == "dgc" and getattr(scheduler, "cycle_momentum", False):
        raise UnsupportedError(
            f"deep gradient compression replaces the optimizer's momentum, which {type(scheduler).__name__} "
            "changes: create the scheduler with cycle_momentum=False"
        )
    lane = Lane(model.device, group_of_lane(model))
    compression = None if wanted is None else build(optimizer, wanted, max_grad_norm, lane)
    if compression is not None and widens:
        compression.dense_itemsize = 4
    state: Compression | Hierarchy | None = compression
    if arguments.hierarchical:
        assert compression is None or isinstance(compression, FlatCompression), (
            "two-level all-reduce requires a compression that works on parts of tensors"
        )
        state = Hierarchy(make_levels(), lane, compression, widens=widens)
    model.register_comm_hook(state, lambda state, bucket: state.reduce(bucket))


def group_of_lane(model: DistributedDataParallel) -> Any:
    """Return the process group for reductions that run during the backward pass; every rank must call it.

    It is the model's own on CUDA, where one thread enters all collectives; elsewhere a new one of the same ranks in the
    same order.
    """
    import torch.distributed as dist

    group = model.process_group
    return group if model.device.type == "cuda" else new_group(dist.get_process_group_ranks(group))


def build(
    optimizer: torch.optim.Optimizer, arguments: CompressionArguments, max_grad_norm: float | None, lane: Lane
) -> Compression:
    """Return the compression technique for the method in the arguments."""
    match arguments.method:
        case "fp16" | "bf16":
            from steptune.tuner.training.compression.sixteen_bit import SixteenBit

            return SixteenBit(lane, arguments.method)
        case "int8":
            from steptune.tuner.training.compression.int8 import Int8

            return Int8(lane)
        case "one_bit":
            from steptune.tuner.training.compression.one_bit import OneBit

            return OneBit(lane)
        case "powersgd":
            from steptune.tuner.training.compression.powersgd import PowerSgd

            return PowerSgd(lane, arguments.rank)
        case "dgc":
            from steptune.tuner.training.compression.deep_gradient import DeepGradient

            return DeepGradient(lane, optimizer, arguments.ratio, arguments.warm_up_steps, max_grad_norm)
    raise AssertionError(f"unknown compression method {arguments.method!r}")


def step_hook_of(model: torch.nn.Module) -> StepHook | None:
    """Return the step hook (compression or local SGD) in a wrapped model's communication hook, or None."""
    states = (state for _, state in getattr(model, "_comm_hooks", ()))
    return compression_of(model) or next((state for state in states if isinstance(state, LocalSgd)), None)


def hierarchy_of(model: torch.nn.Module) -> Hierarchy | None:
    """Return the hierarchy that reduces a wrapped model's gradients in two levels, or None."""
    return next((state for _, state in getattr(model, "_comm_hooks", ()) if isinstance(state, Hierarchy)), None)


def reduced_widely(model: torch.nn.Module) -> int:
    """Return how many 16-bit buckets of a wrapped model were reduced in FP32 so far."""
    states = (state for _, state in getattr(model, "_comm_hooks", ()))
    return sum(state.num_widened for state in states if isinstance(state, WideReduction | Hierarchy))


def compression_of(model: torch.nn.Module) -> Compression | None:
    """Return the compression of a wrapped model's gradients, on all links or between hosts only, or None."""
    hierarchy = hierarchy_of(model)
    if hierarchy is not None:
        return hierarchy.compression
    return next((state for _, state in getattr(model, "_comm_hooks", ()) if isinstance(state, Compression)), None)
