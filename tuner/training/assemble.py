"""Assembling a training job: every technique is applied here, in one order, on one screen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tuner.errors import WorkloadRejected
from tuner.training.job import TrainingJob, batch_mover
from tuner.training.loader import build_loader
from tuner.training.master_weights import MasterWeights
from tuner.training.prefetcher import PrefetchingLoader, copy_stream

if TYPE_CHECKING:
    import torch

    from tuner.training.plan import Plan
    from tuner.workloads.workload import Workload


def assemble(
    workload: Workload,
    plan: Plan,
    *,
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
    make_model: Callable[[], torch.nn.Module] | None = None,
    make_dataset: Callable[[], Any] | None = None,
    batch_sampler: Any = None,
    worker_init: Callable[[int], None] | None = None,
) -> TrainingJob:
    """Builds the job that a plan describes. The process group exists already if there are ranks.

    Args:
        make_model: Replaces `workload.model`, to start from a saved state.
        make_dataset: Replaces `workload.dataset`, to observe it.
        batch_sampler: Replaces the workload's own sampling of a map-style dataset.
        worker_init: Runs in every loader worker before the workload's own `worker_init`.
    """
    # 1. Environment first: threads and back-end flags decide how everything after them computes.
    for setting in plan.environment:
        setting()

    # 2. The model in its first precision on its device, then its layout: a layout change of 16-bit
    #    copies would leave masters and parameters in different layouts.
    model = (make_model or workload.model)().to(device)
    for transform in plan.model:
        model = transform(model, workload)

    # 3. Cast before wrapping, so that wrappers see the dtype they communicate.
    for transform in plan.cast:
        model = transform(model, workload)

    # 4. Checkpointing before compilation: the compiler must see the recomputation to schedule it.
    for transform in plan.checkpointing:
        model = transform(model, workload)

    # 5. Blocks are compiled inside the wrapper, whose hooks must stay outside of the graphs.
    for transform in plan.block_compilation:
        model = transform(model, workload)

    # 6. Wrapped once, from the collected arguments; gradients are averaged from here on.
    if num_ranks > 1:
        model = _data_parallel(model, plan, device)

    # 7. The optimizer after wrapping, so that its groups hold the parameters that are trained.
    named = [(name, p) for name, p in _user_parameters(model) if p.requires_grad]
    if not named:
        raise WorkloadRejected(f"{type(workload).__name__}.model() has no parameter that requires a gradient")
    masters = MasterWeights(named) if plan.optimizer.master_weights else None
    optimizer = workload.optimizer(masters.named() if masters else named)
    optimizer = _with_implementation(optimizer, plan.optimizer.implementation)
    scheduler = workload.scheduler(optimizer)

    # 8. The whole model is compiled last, over everything that was done to it.
    for transform in plan.whole_compilation:
        model = transform(model, workload)

    # 9. The loader: data transforms (caches) go under the workers.
    dataset = (make_dataset or workload.dataset)()
    for dataset_transform in plan.dataset:
        dataset = dataset_transform(dataset, workload)
    loader = build_loader(
        workload,
        dataset,
        plan.loader,
        rank=rank,
        num_ranks=num_ranks,
        batch_sampler=batch_sampler,
        worker_init=worker_init,
    )
    if plan.loader.device_prefetch:
        loader = PrefetchingLoader(loader, batch_mover(workload, plan.loader, device), copy_stream(device))
    return TrainingJob(
        workload=workload,
        plan=plan,
        device=device,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        masters=masters,
        loader=loader,
    )


def _data_parallel(model: torch.nn.Module, plan: Plan, device: torch.device) -> torch.nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, **plan.wrap.ddp)


def _user_parameters(model: torch.nn.Module) -> list[tuple[str, Any]]:
    from tuner.training.job import unwrapped

    return list(unwrapped(model).named_parameters())


def _with_implementation(optimizer: torch.optim.Optimizer, implementation: str | None) -> torch.optim.Optimizer:
    """The same optimizer (class, groups, options) run as a loop, multi-tensor or fused.

    Source: https://docs.pytorch.org/docs/stable/optim.html ("for-loop, foreach and fused").
    """
    if implementation is None:
        return optimizer
    flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    arguments = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in {**optimizer.defaults, **flags}.items() if name in arguments}
    groups = [{**group, **flags} for group in optimizer.param_groups]
    return type(optimizer)(groups, **options)
