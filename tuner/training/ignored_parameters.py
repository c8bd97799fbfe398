"""Parameters that are excluded from sharding, so that every rank has them whole.

For FSDP a module that keeps FP32 while its block gathers 16-bit weights is a unit of its own, with small collectives of
its own. Left out, its gradients are averaged after the backward pass, those of all such modules together in one
all-reduce; every rank updates them alike.

An optimizer cannot mix parts (DTensors) with plain tensors in one multi-tensor operation, nor can clipping: both get a
replicated DTensor in place of each such parameter, over the same memory.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html (`ignored_params`)
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from steptune.tuner.training.layouts import laid_out_like
from steptune.tuner.training.step_hook import StepHook

if TYPE_CHECKING:
    from steptune.tuner.training.step_hook import Named


class IgnoredParameters(StepHook):
    """Hook that pairs every parameter outside all FSDP units with the replicated DTensor that the optimizer updates in
    its place.
    """

    def __init__(self, named_parameters: Named) -> None:
        self._mesh = next(p.device_mesh for _, p in named_parameters if isinstance(p, DTensor))
        self._pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
        self._named: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in named_parameters:
            held = parameter
            if not isinstance(parameter, DTensor):
                held = torch.nn.Parameter(self._replicated(parameter.detach()))
                self._pairs.append((parameter, held))
            self._named.append((name, held))

    def updated(self, named: Named) -> Named:
        """Return the parameters that the optimizer updates, under the user's names."""
        return list(self._named)

    def finish_gradients(self) -> None:
        """Average the gradients over the ranks, and give them to the optimizer's parameters. Each parameter has a
        gradient on all ranks or on none.
        """
        by_dtype = defaultdict(list)
        for parameter, held in self._pairs:
            if parameter.grad is not None:
                by_dtype[parameter.grad.dtype].append((parameter, held))
        for pairs in by_dtype.values():
            flat = torch.cat([parameter.grad.flatten() for parameter, _ in pairs if parameter.grad is not None])
            flat.div_(dist.get_world_size())
            dist.all_reduce(flat)
            pieces = flat.split([parameter.numel() for parameter, _ in pairs])
            for (parameter, held), piece in zip(pairs, pieces, strict=True):
                held.grad = self._replicated(laid_out_like(piece.view(parameter.shape), parameter))
                parameter.grad = None

    def _replicated(self, tensor: torch.Tensor) -> Any:
        placements = [Replicate()] * self._mesh.ndim
        return DTensor.from_local(tensor, self._mesh, placements, run_check=False)
