"""Model sharded across the ranks of a mesh, as one parameter layout of a training job.

Every rank loads its share of a batch as ever; the ranks of a replica then combine their shares, so that all of
them compute on the same samples, augmented and transformed once. Nothing else of the loading changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.training.forward_contexts import forward_contexts
from steptune.tuner.training.initial_state import named_state
from steptune.tuner.training.mesh.chain import Chain
from steptune.tuner.training.mesh.experts import lay_experts
from steptune.tuner.training.mesh.gradients import sum_over
from steptune.tuner.training.mesh.parts import Cut, Held, Replica
from steptune.tuner.training.mesh.pipeline import Pipeline, unchanged_generators
from steptune.tuner.training.mesh.shares import Shares, shares_are_even
from steptune.tuner.training.mesh.staging import cut_chain, first_piece, keep_own, ranks_of_parameters
from steptune.tuner.training.mesh.tensor import share_out, splits_of
from steptune.tuner.training.parameter_layout import ParameterLayout
from steptune.tuner.training.structure import map_structure

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.plan import MeshArguments, Plan
    from steptune.tuner.workloads.workload import Workload


class Mesh(ParameterLayout):
    """Parameter layout of one rank of a device mesh.

    Attributes:
        degrees: Ranks along each axis: "pipeline", "data", "tensor", "expert".
        replica: The ranks that hold one model together.
        data_group: Ranks of all replicas that hold the same parts; None with a single replica.
        own_experts: Names of the expert parameters, which differ between ranks.
    """

    has_every_parameter = False
    has_every_value = False

    def __init__(self, arguments: MeshArguments, device: torch.device) -> None:
        import torch
        import torch.distributed as dist

        size = dist.get_world_size()
        model_ranks = arguments.pipeline * arguments.tensor * arguments.expert
        if size % model_ranks:
            raise UnsupportedError(
                f"the number of ranks ({size}) must be a multiple of the number of ranks per model replica "
                f"({model_ranks})"
            )
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
        # The first and the last stage, which may share a parameter.
        self._ends_group = _group(grid.movedim(0, -1)[..., [0, -1]]) if arguments.pipeline > 1 else None
        self.pipeline: Pipeline | None = None
        self.replica: Replica | None = None
        self._shares: Shares | None = None
        self._names: dict[int, str] = {}
        self._state_names: list[str] = []
        self._trained: list[str] = []
        self._tied: set[str] = set()
        self.own_experts: frozenset[str] = frozenset()

    # --- building -----------------------------------------------------------------------------

    def lay_out(self, model: torch.nn.Module, workload: Workload, plan: Plan, make_dataset: Callable[[], Any]) -> None:
        """Give the model the first rank's initial values, and keep only this rank's parts of it."""
        import torch.distributed as dist

        for _, tensor in named_state(model):
            dist.broadcast(tensor.detach(), src=0)
        self._state_names = list(model.state_dict())
        self._trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        shapes = {name: tuple(tensor.shape) for name, tensor in _all_names(model)}
        cuts: dict[int, Cut] = {}
        if self.arguments.tensor > 1:
            cuts |= share_out(splits_of(workload.blocks(model)), self.tensor_group)
        even = shares_are_even(workload, plan, dist.get_world_size())
        if self.arguments.expert > 1:
            cuts |= lay_experts(model, self.replica_group, even=even)
        cut_names = {name: cuts[id(tensor)] for name, tensor in _all_names(model) if id(tensor) in cuts}
        self.own_experts = frozenset(cut_names) if self.arguments.expert > 1 else frozenset()
        dtypes = {name: tensor.dtype for name, tensor in _all_names(model)}
        on_ranks: dict[str, tuple[int, ...]] = {}
        if self.arguments.pipeline > 1:
            on_ranks = self._lay_pipeline(model, workload, plan, make_dataset)
        held = {}
        for name, shape in shapes.items():
            ranks, cut = on_ranks.get(name), cut_names.get(name)
            held[name] = self._held(shape, dtypes[name], cut, ranks or range(self.arguments.pipeline))
        self.replica = Replica(self.replica_group, held, self.device)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        if self.arguments.expert == 1:
            self._shares = Shares(group=self.replica_group, even=even)

    def _held(self, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None, pipeline_ranks: Sequence[int]) -> Held:
        width = self.arguments.tensor * self.arguments.expert
        first = pipeline_ranks[0] * width
        return Held(
            shape=shape,
            dtype=dtype,
            holders=tuple(range(first, first + width)) if cut else (first,),
            ranks=tuple(rank * width + place for rank in pipeline_ranks for place in range(width)),
            copies=len(pipeline_ranks) * (1 if cut else width),
            cut=cut,
        )

    def _lay_pipeline(
        self, model: torch.nn.Module, workload: Workload, plan: Plan, make_dataset: Callable[[], Any]
    ) -> dict[str, tuple[int, ...]]:
        """Cut the blocks into pipeline stages, and keep only this rank's stages.

        Returns:
            The ranks of the pipeline that train each parameter.
        """
        arguments, data = self.arguments, self.degrees["data"]
        length = max(1, workload.global_batch * plan.batches.factor // data // arguments.num_micro_batches)
        with unchanged_generators(self.device):
            piece = first_piece(workload, plan, make_dataset(), length, self.device)

        def loss() -> torch.Tensor:
            with forward_contexts(plan, self.device):
                return workload.loss(model, piece)

        chain = Chain(model, workload.blocks(model))
        with unchanged_generators(self.device):
            stages, examined = cut_chain(chain, loss, arguments, self.device)
        on_ranks = ranks_of_parameters(chain, examined, stages)
        self._tied = {name for name, ranks in on_ranks.items() if len(ranks) > 1}
        keep_own(chain, examined, stages, on_ranks, self.pipeline_group)
        self.pipeline = Pipeline(
            chain,
            stages,
            examined.dtypes,
            schedule=arguments.schedule,
            piece_length=length,
            group=self.pipeline_group,
            device=self.device,
        )
        return on_ranks

    def description(self) -> dict[str, Any]:
        """Return the axes of the mesh, and the share of the parameters that this rank holds."""
        assert self.replica is not None
        held = self.replica.held
        total = sum(math.prod(held[name].shape) for name in self._trained)
        own = sum(math.prod(self.replica.own_shape(name)) for name in self._trained if self.replica.has(name))
        stages = self.pipeline.stages.starts if self.pipeline else ()
        return {**self.degrees, "share": own / total, "stages": list(stages)}

    # --- the batch ----------------------------------------------------------------------------

    def shared_batch(self, batch: Any) -> Any:
        """Return the combined batch of all ranks of the replica; with expert parallelism, only this rank's own
        share.
        """
        return self._shares.together(batch) if self._shares else batch

    # --- gradients ----------------------------------------------------------------------------

    def finish_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Reduce the gradients that DDP does not: those of experts, of stages, and of parameters used at both ends of a
        pipeline.
        """
        if self.arguments.expert > 1:
            self._average_experts(parameters)
        if self.pipeline is None:
            return
        trained = [(self._names[id(p)], p.grad) for p in parameters if p.grad is not None]
        if self.data_group is not None:
            sum_over([gradient for _, gradient in trained], self.data_group, divisor=self.degrees["data"])
        tied = [gradient for name, gradient in trained if name in self._tied]
        if tied:
            sum_over(tied, self._ends_group)

    def _average_experts(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Average the gradients of experts, which are already summed over their replica."""
        import torch.distributed as dist

        own = [p.grad for p in parameters if p.grad is not None and self._names[id(p)] in self.own_experts]
        if self.data_group is not None:
            sum_over(own, self.data_group, divisor=dist.get_world_size())
            return
        for gradient in own:
            gradient /= dist.get_world_size()

    def norm(self, parameters: Sequence[torch.nn.Parameter], gradients: list[torch.Tensor]) -> float:
        import torch

        return float(self._norm(parameters, torch.float64))

    def _norm(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> torch.Tensor:
        """Return the norm of the whole model's gradients, summed in this dtype."""
        assert self.replica is not None
        gradients = ((self._names[id(p)], p.grad) for p in parameters if p.grad is not None)
        return self.replica.total_norm(gradients, dtype)

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float) -> None:
        import torch

        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, self._norm(parameters, torch.float32))

    # --- state --------------------------------------------------------------------------------

    def state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the whole state under the user's names; every rank must call it."""
        assert self.replica is not None
        own = model.state_dict()
        return {name: self.replica.whole(name, own.get(name)) for name in self._state_names}

    def whole_parameters(
        self, model: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trained parameters whole, one after the other; every rank must iterate over all of them."""
        assert self.replica is not None
        own = dict(model.named_parameters())
        for name in self._trained:
            yield name, self.replica.whole(name, own.get(name))

    def whole_optimizer_state(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer, names: Sequence[str]
    ) -> tuple[dict[str, Any], Sequence[str]]:
        """Return the whole optimizer state, on the CPU, and the parameter names in the order of that state; every rank
        must call it.

        The state is that of an optimizer over whole parameters; every rank gets all of it.
        """
        assert self.replica is not None
        own_groups = self._group_names(optimizer)
        own = dict(zip((name for names in own_groups for name in names), _in_order(state), strict=True))
        groups = self._whole_groups(own_groups)
        numbers = {name: number for number, name in enumerate(name for names in groups for name in names)}
        found = {}
        for name, number in numbers.items():
            parts = self.replica.every(map_structure(_on_cpu, own.get(name)))
            values = self.replica.joined(name, [parts[holder] for holder in self.replica.held[name].holders])
            if values:
                found[number] = values
        options = [
            {**group, "params": [numbers[name] for name in names]}
            for group, names in zip(state["param_groups"], groups, strict=True)
        ]
        return {**state, "state": found, "param_groups": options}, list(numbers)

    def own_optimizer_state(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's part of the whole model's optimizer state; every rank must call this method."""
        assert self.replica is not None
        own_groups = self._group_names(optimizer)
        wholes = dict(
            zip((name for names in self._whole_groups(own_groups) for name in names), _in_order(state), strict=True)
        )
        own = {}
        for number, name in enumerate(name for names in own_groups for name in names):
            shape = self.replica.held[name].shape
            if wholes[name]:
                own[number] = {
                    key: self.replica.own_part(name, value) if getattr(value, "shape", None) == shape else value
                    for key, value in wholes[name].items()
                }
        groups = [
            {**group, "params": mine["params"]}
            for group, mine in zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
        ]
        return {**state, "state": own, "param_groups": groups}

    def _group_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        return [[self._names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def _whole_groups(self, own: list[list[str]]) -> list[list[str]]:
        """Return the parameter names of each optimizer group, over all ranks. They are in the optimizer's order if the
        optimizers of all ranks have the same parameters, else in the model's order.
        """
        assert self.replica is not None
        of_ranks = self.replica.every(own)
        if all(groups == own for groups in of_ranks):
            return own
        together = [{name for groups in of_ranks for name in groups[number]} for number in range(len(own))]
        return [[name for name in self._trained if name in names] for names in together]


def lay_over_mesh(
    model: torch.nn.Module, workload: Workload, plan: Plan, device: torch.device, make_dataset: Callable[[], Any]
) -> tuple[Mesh, torch.nn.Module]:
    """Build the mesh; return it, and the model with this rank's parts, wrapped in DDP where DDP averages gradients."""
    from torch.nn.parallel import DistributedDataParallel

    assert plan.wrap.mesh is not None
    mesh = Mesh(plan.wrap.mesh, device)
    mesh.lay_out(model, workload, plan, make_dataset)
    experts = mesh.arguments.expert > 1
    if mesh.pipeline is not None or (mesh.data_group is None and not experts):
        return mesh, model
    if experts:  # whatever else they have, all ranks average
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, mesh.own_experts)
    device_ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=device_ids, process_group=None if experts else mesh.data_group, **plan.wrap.ddp
    )
    return mesh, wrapped


def _group(grid: torch.Tensor) -> Any:
    """Return this rank's process group along the last axis; every rank creates all of the groups."""
    import torch.distributed as dist

    group, _ = dist.new_subgroups_by_enumeration(grid.reshape(-1, grid.shape[-1]).tolist())
    return group


def _in_order(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state of each parameter in an optimizer's state dict, in the order of the parameter groups."""
    return (state["state"].get(number, {}) for group in state["param_groups"] for number in group["params"])


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if hasattr(leaf, "cpu") else leaf


def _all_names(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
