"""Assembling a training job: every technique is applied here, in one order, on one screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tuner.errors import WorkloadRejected
from tuner.training.communication import attach as attach_hook
from tuner.training.job import TrainingJob, batch_mover
from tuner.training.loader import build_loader
from tuner.training.master_weights import MasterWeights
from tuner.training.optimizer import build_optimizer, check_rates
from tuner.training.plan import WrapArguments
from tuner.training.prefetcher import PrefetchingLoader, copy_stream
from tuner.training.regrouping import LengthOf, regroup
from tuner.training.sharding import shard

if TYPE_CHECKING:
    import torch

    from tuner.training.plan import BatchArguments, Plan
    from tuner.workloads.batches import EndlessBatches
    from tuner.workloads.workload import Workload

REGROUPING_SEED = 0


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
    """Builds the job that a plan describes. The process group exists already if there are ranks.

    Args:
        make_model: Replaces `workload.model`, to start from a saved state.
        make_dataset: Replaces `workload.dataset`, to observe it.
        batch_sampler: Replaces the workload's own sampling of a map-style dataset. Where the plan has other
            batches, the loader has one of the same samples in its place.
        worker_init: Runs in every loader worker before the workload's own `worker_init`.
    """
    from torch.nn.parallel import DistributedDataParallel

    from tuner.training.ignored_parameters import IgnoredParameters

    # One rank has nobody to share or to reduce with, whatever several would.
    if num_ranks == 1:
        plan.wrap = WrapArguments()

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
        model = _wrapped(model, workload, plan, device)

    # 7. The optimizer after wrapping, so that its groups hold the parameters that are trained.
    named = [(name, p) for name, p in _user_parameters(model) if p.requires_grad]
    if not named:
        raise WorkloadRejected(f"{type(workload).__name__}.model() has no parameter that requires a gradient")
    ignored = IgnoredParameters(named) if plan.wrap.ignores_parameters else None
    named = ignored.named() if ignored else named
    masters = MasterWeights(named) if plan.optimizer.master_weights else None
    built = build_optimizer(workload, masters.named() if masters else named, plan, device)
    if masters:
        masters.check(built.optimizer)
    other_rates = plan.optimizer.rate_factor != 1.0 or plan.optimizer.algorithm in workload.learning_rates
    rates = [float(group["lr"]) for group in built.optimizer.param_groups] if other_rates else []
    scheduler = workload.scheduler(built.optimizer)
    if other_rates:
        check_rates(built.optimizer, rates, scheduler)
    if isinstance(model, DistributedDataParallel):
        attach_hook(model, built.optimizer, scheduler, plan.wrap, workload.max_grad_norm)

    # 8. The whole model is compiled last, over everything that was done to it.
    for transform in plan.whole_compilation:
        model = transform(model, workload)

    # 9. The step is recorded as CUDA graphs when the first batch comes (`CapturedStep`), over all of the above.

    # 10. The loader: data transforms (caches) go under the workers.
    own_dataset = dataset = (make_dataset or workload.dataset)()
    for dataset_transform in plan.dataset:
        dataset = dataset_transform(dataset, workload)

    def length(index: int) -> int:
        return workload.length(own_dataset, index)

    loader = build_loader(
        workload,
        dataset,
        plan.loader,
        rank=rank,
        num_ranks=num_ranks,
        batch_sampler=_regrouped(batch_sampler, plan.batches, length, num_ranks),
        worker_init=worker_init,
        batches=plan.batches,
        length=length,
    )
    if plan.loader.device_prefetch:
        loader = PrefetchingLoader(loader, batch_mover(workload, plan.loader, device), copy_stream(device))
    return TrainingJob(
        workload=workload,
        plan=plan,
        device=device,
        model=model,
        optimizer=built.optimizer,
        scheduler=scheduler,
        masters=masters,
        flat=built.flat,
        ignored=ignored,
        user_flags=built.user_flags,
        loader=loader,
    )


def _wrapped(model: torch.nn.Module, workload: Workload, plan: Plan, device: torch.device) -> torch.nn.Module:
    """By FSDP or DDP."""
    from torch.nn.parallel import DistributedDataParallel

    if plan.wrap.shards_parameters:
        return shard(model, workload, plan.wrap, device)
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, **plan.wrap.ddp)


def _user_parameters(model: torch.nn.Module) -> list[tuple[str, Any]]:
    from tuner.training.job import unwrapped

    return list(unwrapped(model).named_parameters())


def _regrouped(
    order: EndlessBatches | None, arguments: BatchArguments, length: LengthOf, num_ranks: int
) -> EndlessBatches | None:
    """The fixed order in the plan's batches; the workload's own sampling is regrouped by the loader."""
    if order is None or arguments.is_plain:
        return order
    batches = regroup(order.batches, arguments, length, num_ranks, seed=REGROUPING_SEED)
    return order.regrouped(batches, merged=arguments.factor, pool=max(1, arguments.pool_batches), length=length)
