"""A model laid over the ranks of a mesh: what a training job asks of it.

Every rank loads its share of a batch as ever; the ranks of a replica then put their shares together, so that all of them
compute on the same samples, augmented and transformed once. Nothing else of the loading changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.errors import UnsupportedHere
from tuner.training.initial_state import named_state
from tuner.training.mesh.parts import Cut, Held, Replica
from tuner.training.mesh.shares import Shares, shares_are_even
from tuner.training.mesh.tensor import share_out, splits_of

if TYPE_CHECKING:
    import torch

    from tuner.training.plan import MeshArguments, Plan
    from tuner.workloads.workload import Workload


class Mesh:
    """One rank's view.

    Attributes:
        degrees: Ranks along each axis: "pipeline", "data", "tensor", "expert".
        replica: The ranks that hold one model together.
        data_group: Ranks that hold the same parts, of other replicas; None where there are no others.
    """

    def __init__(self, arguments: MeshArguments, device: torch.device) -> None:
        import torch
        import torch.distributed as dist

        size = dist.get_world_size()
        model_ranks = arguments.pipeline * arguments.tensor * arguments.expert
        if size % model_ranks:
            raise UnsupportedHere(f"{size} ranks cannot be shared out as replicas of {model_ranks}")
        self.arguments = arguments
        self.device = device
        self.degrees = {
            "pipeline": arguments.pipeline,
            "data": size // model_ranks,
            "tensor": arguments.tensor,
            "expert": arguments.expert,
        }
        grid = torch.arange(size).view(*self.degrees.values())
        self.tensor_group = _group(grid.movedim(2, -1))
        self.pipeline_group = _group(grid.movedim(0, -1))
        self.replica_group = _group(grid.movedim(1, 0).flatten(1))
        self.data_group = _group(grid.movedim(1, -1)) if self.degrees["data"] > 1 else None
        self.replica: Replica | None = None
        self.shares: Shares | None = None
        self._names: dict[int, str] = {}
        self._state_names: list[str] = []

    # --- building -----------------------------------------------------------------------------

    def lay_out(self, model: torch.nn.Module, workload: Workload, plan: Plan) -> None:
        """Leaves on this rank its parts, those that the first rank's model has."""
        import torch.distributed as dist

        for _, tensor in named_state(model):
            dist.broadcast(tensor.detach(), src=0)
        self._state_names = list(model.state_dict())
        shapes = {name: tuple(tensor.shape) for name, tensor in _all_names(model)}
        cuts: dict[int, Cut] = {}
        if self.arguments.tensor > 1:
            cuts |= share_out(splits_of(workload.blocks(model)), self.tensor_group)
        self._hold(model, shapes, cuts)
        even = shares_are_even(workload, plan, dist.get_world_size())
        self.shares = Shares(group=self.replica_group, even=even)

    def _hold(
        self, model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], cuts: Mapping[int, Cut]
    ) -> None:
        """Notes where everything is."""
        import torch.distributed as dist

        size = dist.get_world_size(self.replica_group)
        held = {}
        for name, tensor in _all_names(model):
            cut = cuts.get(id(tensor))
            held[name] = Held(
                shape=shapes[name],
                dtype=tensor.dtype,
                holders=tuple(range(size)) if cut else (0,),
                copies=1 if cut else size,
                cut=cut,
            )
        self.replica = Replica(self.replica_group, held, self.device)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def description(self) -> dict[str, Any]:
        """The axes, and the share of the parameters that this rank has."""
        assert self.replica is not None
        wholes = {name: math.prod(self.replica.held[name].shape) for name in self._names.values()}
        own = sum(math.prod(self.replica.own_shape(name)) for name in wholes)
        return {**self.degrees, "share": own / sum(wholes.values())}

    # --- the batch ----------------------------------------------------------------------------

    def gathered(self, batch: Any) -> Any:
        """The shares of all ranks of the replica."""
        assert self.shares is not None
        return self.shares.together(batch)

    # --- gradients ----------------------------------------------------------------------------

    def total_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """Of the gradients of the whole model."""
        assert self.replica is not None
        return self.replica.total_norm((self._names[id(p)], p.grad) for p in parameters if p.grad is not None)

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> None:
        import torch

        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, self.total_norm(parameters))

    # --- state --------------------------------------------------------------------------------

    def whole_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Under the user's names; every rank calls it and gets all."""
        assert self.replica is not None
        own = model.state_dict()
        return {name: self.replica.whole(name, own.get(name)) for name in self._state_names}

    def whole_parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are trained, one after the other; every rank goes through all of them."""
        assert self.replica is not None
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield name, self.replica.whole(name, parameter)

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """As an optimizer over whole parameters has it; every rank calls it and gets all."""
        assert self.replica is not None
        state = optimizer.state_dict()
        numbers = self._numbers(optimizer)
        for number, values in state["state"].items():
            name = numbers[number]
            part = self.replica.own_shape(name)
            state["state"][number] = {
                key: self.replica.whole(name, value, of=value.dtype) if getattr(value, "shape", None) == part else value
                for key, value in values.items()
            }
        return state

    def own_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What of a whole optimizer's state is this rank's."""
        assert self.replica is not None
        numbers = self._numbers(optimizer)
        own = {}
        for number, values in state["state"].items():
            name = numbers[number]
            shape = self.replica.held[name].shape
            own[number] = {
                key: self.replica.own_part(name, value) if getattr(value, "shape", None) == shape else value
                for key, value in values.items()
            }
        return {**state, "state": own}

    def _numbers(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names in the order in which a state dict counts parameters."""
        return [self._names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def lay_over_mesh(
    model: torch.nn.Module, workload: Workload, plan: Plan, device: torch.device
) -> tuple[Mesh, torch.nn.Module]:
    """The mesh, and the model with this rank's parts; wrapped, where ranks of other replicas have the same ones."""
    from torch.nn.parallel import DistributedDataParallel

    assert plan.wrap.mesh is not None
    mesh = Mesh(plan.wrap.mesh, device)
    mesh.lay_out(model, workload, plan)
    if mesh.data_group is None:
        return mesh, model
    device_ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=device_ids, process_group=mesh.data_group, **plan.wrap.ddp)
    return mesh, wrapped


def _group(grid: torch.Tensor) -> Any:
    """This rank's process group among those of the last axis; every rank makes all of them."""
    import torch.distributed as dist

    group, _ = dist.new_subgroups_by_enumeration(grid.reshape(-1, grid.shape[-1]).tolist())
    return group


def _all_names(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
