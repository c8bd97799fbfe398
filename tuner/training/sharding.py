"""Sharding of parameters, gradients and optimizer states: FSDP2 (`fully_shard`), and ZeRO-1.

A unit is a module whose parameters are gathered together just before they are used: the repeated blocks, or modules of
at least `min_num_params`; the root has all others. Every rank holds a part of every parameter
(a DTensor), under the user's own names; so the optimizer's states are parts too.

The number formats are those of `precision`: at its level O2 the parts stay in FP32, as masters, and units gather
16-bit weights and reduce gradients in FP32; modules that keep FP32 are units of their own, or left out
(`ignored_parameters`).

Sources: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html ;
https://docs.pytorch.org/docs/stable/distributed.optim.html (`ZeroRedundancyOptimizer`)
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.network.exchange import frees
from steptune.tuner.training.casting import fp32_modules
from steptune.tuner.training.hosts import host_of_ranks, members_of, ring_group
from steptune.tuner.training.initial_state import named_state
from steptune.tuner.training.structure import map_structure

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from steptune.tuner.training.plan import ShardingArguments, WrapArguments
    from steptune.tuner.workloads.workload import Workload


def shard(
    model: torch.nn.Module, workload: Workload, arguments: WrapArguments, device: torch.device
) -> torch.nn.Module:
    """Shard the model's parameters over all ranks, in place; the initial values are those of rank 0."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    sharding = arguments.sharding
    assert sharding is not None
    if sharding.cpu_offload:
        _check_reduces_on_cpu()
    for _, tensor in named_state(model):
        dist.broadcast(tensor.detach(), src=0)
    apart = [module for _, module in fp32_modules(model)]
    ignored = {p for module in apart for p in module.parameters()} if sharding.ignored else set()
    pinned = device.type != "cpu"
    options: dict[str, Any] = {
        "mesh": _mesh(sharding, device),
        "ignored_params": ignored,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if sharding.cpu_offload else OffloadPolicy(),
    }
    freed = frees(sharding.mode, reshard=sharding.reshard)
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    # Conflicts leave bfloat16, the only format of gradient_compression in which FSDP itself can reduce.
    reduce_dtype = torch.float32 if arguments.compression is None else torch.bfloat16
    units = units_of(model, workload, sharding)
    if arguments.param_dtype is not None:
        # precision casts what goes in and out of the model and of what keeps FP32.
        for module in apart:
            if not ignored and any(True for _ in module.parameters()):
                fully_shard(module, mp_policy=policy, reshard_after_forward=freed, **options)
        dtype = getattr(torch, arguments.param_dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    elif arguments.compression is not None:
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for unit in units:
        fully_shard(unit, mp_policy=policy, reshard_after_forward=freed, **options)
    # What only the root holds is needed first in the backward pass again: freeing it pays where it is everything.
    fully_shard(model, mp_policy=policy, reshard_after_forward=freed and not units, **options)
    _prefetch(units, "forward", sharding.prefetch)
    _prefetch(units[::-1], "backward", sharding.backward_prefetch)
    return model


def units_of(model: torch.nn.Module, workload: Workload, sharding: ShardingArguments) -> list[torch.nn.Module]:
    """Return the modules that are gathered as one unit each, inner ones first, without the root."""
    if sharding.wrap == "block":
        return list(workload.blocks(model))
    return _large_modules(model, sharding.min_num_params) if sharding.wrap == "size" else []


def sizes_of_units(model: torch.nn.Module, workload: Workload, wrap: str, min_num_params: int) -> tuple[int, int]:
    """Return the number of elements in the largest unit and in the root alone. A tied parameter belongs to its first
    unit.
    """
    taken: set[int] = set()
    sizes = [0]
    units = list(workload.blocks(model)) if wrap == "block" else []
    for unit in _large_modules(model, min_num_params) if wrap == "size" else units:
        own = [p for p in unit.parameters() if id(p) not in taken]
        taken |= {id(p) for p in own}
        sizes.append(sum(p.numel() for p in own))
    return max(sizes), sum(p.numel() for p in model.parameters() if id(p) not in taken)


def _large_modules(model: torch.nn.Module, minimum: int) -> list[torch.nn.Module]:
    """Return the modules that are gathered as one unit each, selected by size as in FSDP's
    `size_based_auto_wrap_policy`.

    They have at least `minimum` parameters outside of units inside them. A tied parameter goes to a module that
    contains all of its uses, because two units cannot share it.
    """
    import torch

    found: list[torch.nn.Module] = []
    holders = _holders(model)

    def visit(module: torch.nn.Module) -> list[torch.nn.Parameter]:
        if isinstance(module, torch.nn.MultiheadAttention):  # it uses its projection's weights without calling it
            left = list(module.parameters())
        else:
            own = module.parameters(recurse=False)
            left = [*own, *(parameter for child in module.children() for parameter in visit(child))]
        holds_only = isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)  # is never called
        if module is model or holds_only or sum(p.numel() for p in {id(p): p for p in left}.values()) < minimum:
            return left
        inside = _holders(module)
        if any(inside[id(parameter)] < holders[id(parameter)] for parameter in left):
            return left
        found.append(module)
        return []

    visit(model)
    return found


def _holders(model: torch.nn.Module) -> Counter[int]:
    """Count the modules that hold each parameter, by the parameter's identity."""
    every = (parameter for module in model.modules() for parameter in module._parameters.values())
    return Counter(id(parameter) for parameter in every if parameter is not None)


def _mesh(sharding: ShardingArguments, device: torch.device) -> DeviceMesh:
    """Return the device mesh: all ranks in one dimension, ordered by host; for hybrid sharding two dimensions, hosts
    and the ranks of a host.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if sharding.mode != "hybrid":
        return DeviceMesh.from_group(ring_group(), device.type)
    hosts = members_of(host_of_ranks())
    if len({len(ranks) for ranks in hosts}) != 1:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise UnsupportedError(f"hybrid sharding requires the same number of ranks on every host, got {counts}")
    return DeviceMesh(device.type, [list(ranks) for ranks in hosts], mesh_dim_names=("between", "inside"))


def _check_reduces_on_cpu() -> None:
    """Refuse CPU offload if the process group has no CPU collectives: norms, and gathering of parts in CPU memory, need
    them.

    Raises:
        UnsupportedError: The process group has no CPU collectives.
    """
    from torch.distributed.distributed_c10d import get_backend_config

    config = get_backend_config()
    if "cpu:" not in config:
        raise UnsupportedError(
            f"CPU offload reduces gradients on the CPU, but the process group has only {config}: initialise it "
            'with init_process_group("cpu:gloo,cuda:nccl")'
        )


def _prefetch(units: list[torch.nn.Module], way: str, depth: int) -> None:
    """Make each unit gather the next `depth` units, in the order of use; by default FSDP gathers one."""
    if depth == 1:
        return
    for place, unit in enumerate(units):
        getattr(unit, f"set_modules_to_{way}_prefetch")(units[place + 1 : place + 1 + depth])


def is_sharded(model: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def description_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return FSDP's own description of a sharded model."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
    from torch.distributed.tensor import DTensor

    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    parts = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return {
        "units": len(groups),
        "frees": any(group.post_forward_mesh_info is not None for group in groups),
        "hybrid": any(part.device_mesh.ndim == 2 for part in parts),
        "share": sum(part.to_local().numel() for part in parts) / sum(part.numel() for part in parts),
        "prefetch": max((len(state._states_to_forward_prefetch) for state in states), default=0) or 1,
        "backward_prefetch": max((len(state._states_to_backward_prefetch) for state in states), default=0) or 1,
        "cpu_offload": all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups),
        "ignored": sum(1 for _ in model.parameters()) - len(parts),
    }


def reduction_factor(model: torch.nn.Module) -> float:
    """Return the factor by which the reduction dtype shrinks the gradients that a sharded model sends, relative to the
    dtype of its parameters; 1 without a saving.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule

    whole_bytes = sent_bytes = 0
    for module in model.modules():
        group: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for held in group.fsdp_params if group is not None else ():
            part = held.sharded_param
            sent = group.mp_policy.reduce_dtype or part.dtype
            whole_bytes += part.numel() * part.element_size()
            sent_bytes += part.numel() * min(part.element_size(), torch.empty((), dtype=sent).element_size())
    return whole_bytes / max(1, sent_bytes)


@contextmanager
def unreduced(model: torch.nn.Module) -> Iterator[None]:
    """Keep each rank's gradients whole and unreduced in backward passes inside the context, and accumulate them
    there.
    """
    sharded: Any = model
    sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)


def gathered_dtypes(model: torch.nn.Module) -> dict[int, torch.dtype]:
    """Return the dtype in which each sharded parameter is used for computation, by the parameter's identity."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, torch.dtype] = {}
    for module in model.modules():
        group: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for held in group.fsdp_params if group is not None else ():
            dtype = group.mp_policy.param_dtype or held.sharded_param.dtype
            found[id(held.sharded_param)] = dtype
    return found


# --- whole values -----------------------------------------------------------------------------


def whole(value: Any) -> Any:
    """Return a structure of tensors in which sharded tensors are gathered; every rank must call it."""
    return map_structure(lambda leaf: leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf, value)


def laid_out_as(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Shard a whole value, which all ranks have, as `tensor` is sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value.to(tensor.device).contiguous(), tensor.device_mesh, tensor.placements)


def laid_out(state: dict[str, Any], parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """Return a whole optimizer state as parts, each sharded across the ranks as its parameter is."""

    def part(value: Any, parameter: torch.nn.Parameter) -> Any:
        return laid_out_as(parameter, value) if getattr(value, "shape", None) == parameter.shape else value

    parts = {
        number: {name: part(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": parts}


# --- ZeRO-1 -----------------------------------------------------------------------------------


def zero_redundancy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Shard an optimizer's states with ZeRO-1: one rank keeps each parameter's state and sends its update to the
    others.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return ZeroRedundancyOptimizer(optimizer.param_groups, optimizer_class=type(optimizer), **options)


def is_zero_redundancy(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer is ZeRO-1, without importing its class.

    The import would compile scripts and warn; for an optimizer of that class it has happened already.
    """
    loaded = sys.modules.get("torch.distributed.optim")
    return loaded is not None and isinstance(optimizer, loaded.ZeroRedundancyOptimizer)


def holder_of_states(optimizer: Any) -> Any:
    """Return the holder of this rank's states: under ZeRO-1 the inner optimizer, else the optimizer itself."""
    return optimizer.optim if is_zero_redundancy(optimizer) else optimizer


def num_held(optimizer: Any) -> int:
    """Return the number of parameters whose states are on this rank."""
    return len(optimizer.optim.state)


def consolidated(optimizer: Any) -> dict[str, Any]:
    """Return the whole optimizer state, gathered from all ranks. Every rank must call this function and gets the whole
    state.
    """
    import torch.distributed as dist

    state: dict[str, Any] = {}
    for rank in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(to=rank)
        if dist.get_rank() == rank:
            state = optimizer.state_dict()
    return state
