"""Placement of pipeline stages: cuts from the first rank's measurements, and the model parts that each rank keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptune.tuner.errors import UnsupportedError
from steptune.tuner.hardware import device_memory_bytes
from steptune.tuner.training.mesh.layer_costs import measure
from steptune.tuner.training.mesh.pipeline import Stages, num_stages
from steptune.tuner.training.mesh.stages import cut_stages
from steptune.tuner.training.structure import moved

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.mesh.chain import Chain, Examined, Loss
    from steptune.tuner.training.plan import MeshArguments, Plan
    from steptune.tuner.workloads.workload import Workload


def first_piece(workload: Workload, plan: Plan, dataset: Any, length: int, device: torch.device) -> Any:
    """Return a micro-batch of the dataset's first samples, on the device."""
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {} if workload.collate is None else {"collate_fn": workload.collate}
    loader: Any = DataLoader(dataset, batch_size=length, **options)
    batch = workload.batch_transform(moved(next(iter(loader)), device, non_blocking=False))
    for transform in plan.batch:
        batch = transform(batch)
    return batch


def cut_chain(chain: Chain, loss: Loss, arguments: MeshArguments, device: torch.device) -> tuple[Stages, Examined]:
    """Examine, measure and cut a chain; every rank uses the first rank's cuts.

    Raises:
        UnsupportedError: The blocks are not a chain, or are too few.
    """
    import torch.distributed as dist

    count = num_stages(arguments.schedule, arguments.pipeline)
    if len(chain.blocks) < count:
        raise UnsupportedError(
            f"requires at least {count} repeated blocks for {count} pipeline stages, got {len(chain.blocks)}"
        )
    examined = chain.examine(loss)
    costs = measure(chain, examined, loss, device)
    is_cuda = device.type == "cuda"
    starts: list[Any] = [
        cut_stages(
            costs,
            count,
            num_ranks=arguments.pipeline,
            schedule=arguments.schedule,
            num_micro_batches=arguments.num_micro_batches,
            memory_bytes=device_memory_bytes(device) if is_cuda else float("inf"),
        )
    ]
    dist.broadcast_object_list(starts, src=0)
    return Stages(starts=starts[0], num_blocks=len(chain.blocks), num_ranks=arguments.pipeline), examined


def ranks_of_parameters(chain: Chain, examined: Examined, stages: Stages) -> dict[str, tuple[int, ...]]:
    """Return the pipeline ranks that train each parameter: two ranks if the parameter is used both before and after the
    blocks.
    """
    ids = {id(p): number for number, block in enumerate(chain.blocks) for p in block.parameters()}
    first_names = {id(parameter): name for name, parameter in chain.model.named_parameters()}
    found: dict[str, tuple[int, ...]] = {}
    for name, parameter in chain.model.named_parameters(remove_duplicate=False):
        number = ids.get(id(parameter))
        first = first_names[id(parameter)]
        if number is not None:
            used = {stages.stage_of(number)}
        else:
            used = {0} if first in examined.front or first not in examined.back else set()
            used |= {stages.last} if first in examined.back else set()
        found[name] = tuple(sorted({stage % stages.num_ranks for stage in used}))
    return found


def keep_own(
    chain: Chain, examined: Examined, stages: Stages, on_ranks: dict[str, tuple[int, ...]], group: Any
) -> None:
    """Free the parameters that this rank never uses. Parameters before the blocks stay on every rank and are trained on
    the first.

    Raises:
        UnsupportedError: A rank would have nothing to train.
    """
    import torch
    import torch.distributed as dist

    rank = dist.get_rank(group)
    parameters = dict(chain.model.named_parameters())
    first_names = {id(parameter): name for name, parameter in parameters.items()}
    trained = {name for name, p in chain.model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for other in range(stages.num_ranks):
        if not any(other in on_ranks[name] for name in trained):
            raise UnsupportedError(f"rank {other} of the pipeline would have no trainable parameter")
    inside = {id(p) for block in chain.blocks for p in block.parameters()}
    for module in chain.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            first = first_names[id(parameter)]
            if rank in on_ranks[first]:
                continue
            if id(parameter) in inside or (first in examined.back and first not in examined.front):
                freed = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                module.register_parameter(name, freed)
            else:
                parameter.requires_grad_(False)
