"""Assembly of a training job: all techniques are applied here, in one fixed order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from steptune.tuner.training.captured_step import CapturedStep
from steptune.tuner.training.host_step import HostStep
from steptune.tuner.training.hosts import ring_group
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.layouts import layout_of
from steptune.tuner.training.loader import build_loader
from steptune.tuner.training.mesh.mesh import lay_over_mesh
from steptune.tuner.training.pipeline_step import PipelineStep
from steptune.tuner.training.plan import WrapArguments
from steptune.tuner.training.prefetcher import PrefetchingLoader, batch_mover, copy_stream
from steptune.tuner.training.regrouping import LengthOf, regroup
from steptune.tuner.training.sharding import shard
from steptune.tuner.training.update import build_update
from steptune.tuner.workloads.knobs import set_knobs

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.mesh.mesh import Mesh
    from steptune.tuner.training.plan import BatchArguments, Plan
    from steptune.tuner.training.step_runner import StepRunner
    from steptune.tuner.workloads.batches import EndlessBatches
    from steptune.tuner.workloads.workload import Workload

REGROUPING_SEED = 0

_T = TypeVar("_T")


def assemble(
    workload: Workload,
    plan: Plan,
    *,
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
    make_model: Callable[[], torch.nn.Module] | None = None,
    make_dataset: Callable[[], Any] | None = None,
    batch_sampler: EndlessBatches | None = None,
    worker_init: Callable[[int], None] | None = None,
) -> TrainingJob:
    """Build the job that a plan describes. With several ranks the process group must exist already.

    Args:
        make_model: Replaces `workload.model`, to start from a saved state.
        make_dataset: Replaces `workload.dataset`, to observe it.
        batch_sampler: Replaces the workload's own sampling of a map-style dataset. Where the plan regroups batches, the
            loader uses a sampler of the same samples in its place.
        worker_init: Runs in every loader worker before the workload's own `worker_init`.
    """
    # One rank has nobody to share or to reduce with, whatever several would.
    if num_ranks == 1:
        plan.wrap = WrapArguments()

    # 1. Environment first: threads, back-end flags and the workload's own knobs decide what everything after them does.
    set_knobs(workload, plan.knobs)
    for setting in plan.environment:
        setting()

    # 2. to 5. The model on its device, as each rank by itself trains it.
    model = (make_model or workload.model)().to(device)
    user_layouts = {name: layout_of(parameter) for name, parameter in model.named_parameters()}
    model = _transformed_model(model, workload, plan)

    # 6. Wrapped once, from the collected arguments; gradients are averaged from here on.
    make_dataset = make_dataset or workload.dataset
    mesh = None
    if num_ranks > 1 and plan.wrap.mesh is not None:
        mesh, model = lay_over_mesh(model, workload, plan, device, make_dataset)
    elif num_ranks > 1:
        model = _wrapped(model, workload, plan, device)

    # 7. The optimizer after wrapping, so that its groups hold the parameters that are trained.
    update = build_update(model, workload, plan, device, layout=mesh)

    # 8. The whole model is compiled last, over everything that was done to it.
    model = _transformed(model, plan.whole_compilation, workload)

    # 9. How a step is run. One that is recorded as CUDA graphs is so when the first batch comes, over all of the above.
    make_runner = _step_runner(workload, plan, mesh)

    # 10. The loader: data transforms (caches) go under the workers.
    loader = _loader(
        workload, plan, make_dataset(), batch_sampler, rank=rank, num_ranks=num_ranks, worker_init=worker_init
    )
    if plan.loader.device_prefetch:
        loader = PrefetchingLoader(loader, batch_mover(workload, plan.loader, device), copy_stream(device))
    return TrainingJob(
        workload=workload,
        plan=plan,
        device=device,
        model=model,
        optimizer=update.built.optimizer,
        scheduler=update.scheduler,
        layout=update.layout,
        hooks=update.hooks,
        user_flags=update.built.user_flags,
        user_layouts=user_layouts,
        names=update.built.names,
        user_rates=update.built.user_rates,
        loader=loader,
        make_runner=make_runner,
    )


def _step_runner(workload: Workload, plan: Plan, mesh: Mesh | None) -> Callable[[TrainingJob], StepRunner]:
    if plan.step.captured and not workload.has_custom_step:
        return CapturedStep
    if mesh is not None and mesh.pipeline is not None:
        return functools.partial(PipelineStep, pipeline=mesh.pipeline)
    return HostStep


def _transformed_model(model: torch.nn.Module, workload: Workload, plan: Plan) -> torch.nn.Module:
    # 2. Layouts in the first precision: a layout change of 16-bit copies would leave masters and parameters in
    #    different layouts.
    model = _transformed(model, plan.model, workload)

    # 3. Cast before wrapping, so that wrappers see the dtype they communicate.
    model = _transformed(model, plan.cast, workload)

    # 4. Checkpointing before compilation: the compiler must see the recomputation to schedule it.
    model = _transformed(model, plan.checkpointing, workload)

    # 5. Blocks are compiled inside the wrapper, whose hooks must stay outside of the graphs.
    return _transformed(model, plan.block_compilation, workload)


def _transformed(subject: _T, transforms: Sequence[Callable[[_T, Workload], _T]], workload: Workload) -> _T:
    """Return a model or a dataset after all transforms of one stage."""
    for transform in transforms:
        subject = transform(subject, workload)
    return subject


def _wrapped(model: torch.nn.Module, workload: Workload, plan: Plan, device: torch.device) -> torch.nn.Module:
    """Wrap the model with FSDP or DDP."""
    from torch.nn.parallel import DistributedDataParallel

    if plan.wrap.shards_parameters:
        return shard(model, workload, plan.wrap, device)
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, process_group=ring_group(), **plan.wrap.ddp)


def _loader(
    workload: Workload,
    plan: Plan,
    dataset: Any,
    batch_sampler: EndlessBatches | None,
    *,
    rank: int,
    num_ranks: int,
    worker_init: Callable[[int], None] | None,
) -> Any:
    """Build the loader over the transformed dataset, with sample lengths taken from the workload itself."""

    def length(index: int) -> int:
        return workload.length(dataset, index)

    return build_loader(
        workload,
        _transformed(dataset, plan.dataset, workload),
        plan.loader,
        rank=rank,
        num_ranks=num_ranks,
        batch_sampler=_regrouped(batch_sampler, plan.batches, length, num_ranks),
        worker_init=worker_init,
        batches=plan.batches,
        length=length,
    )


def _regrouped(
    order: EndlessBatches | None, arguments: BatchArguments, length: LengthOf, num_ranks: int
) -> EndlessBatches | None:
    """Return the fixed order of batches, regrouped into the plan's batches. Return None if no order is fixed; the
    loader then regroups the batches of the workload's own sampling.
    """
    if order is None or arguments.is_plain:
        return order
    batches = regroup(order.batches, arguments, length, num_ranks, seed=REGROUPING_SEED)
    return order.regrouped(batches, merged=arguments.factor, pool=max(1, arguments.pool_batches), length=length)
