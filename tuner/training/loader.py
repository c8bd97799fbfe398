"""DataLoader of a training job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from steptune.tuner.hardware import unbind_thread
from steptune.tuner.training.epochs_ahead import EpochsAhead
from steptune.tuner.training.regrouping import BalancedBatches, LengthOf, MergedBatches

if TYPE_CHECKING:
    from steptune.tuner.training.plan import BatchArguments, LoaderArguments
    from steptune.tuner.workloads.workload import Workload


def build_loader(
    workload: Workload,
    dataset: Any,
    arguments: LoaderArguments,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    batch_sampler: Any = None,
    worker_init: Callable[[int], None] | None = None,
    batches: BatchArguments | None = None,
    length: LengthOf | None = None,
) -> Any:
    """Build the DataLoader with the plan's arguments.

    Sampling, in this order: `batch_sampler` as given; the workload's own batch sampler or sampler; a
    shuffle (split over the ranks). An iterable dataset samples itself. All but the first are regrouped as
    `batches` says, by the `length` of samples where it needs that.
    """
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

    factor = batches.factor if batches else 1
    per_rank = workload.global_batch * factor // num_ranks
    options = _options(workload, arguments, worker_init)
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=per_rank, drop_last=workload.drop_last, **options)
    if batch_sampler is None and batches is not None and batches.pool_batches:
        assert length is not None
        batch_sampler = BalancedBatches(workload, dataset, batches, length, rank=rank, num_ranks=num_ranks)
    if batch_sampler is None:
        batch_sampler = workload.batch_sampler(dataset)
        if batch_sampler is not None and factor > 1:
            batch_sampler = MergedBatches(batch_sampler, factor, keep_rest=not workload.drop_last)
    sampling: dict[str, Any] = {"batch_sampler": batch_sampler}
    if batch_sampler is None:
        sampler = workload.sampler(dataset)
        if sampler is None and num_ranks > 1:
            sampler = DistributedSampler(dataset, num_ranks, rank, drop_last=workload.drop_last)
        sampling = {
            "batch_size": per_rank,
            "sampler": sampler,
            "shuffle": sampler is None,
            "drop_last": workload.drop_last,
        }
    loader = DataLoader(dataset, **sampling, **options)
    ahead = arguments.epochs_ahead and options.get("persistent_workers")
    return EpochsAhead(loader, options) if ahead else loader


def _options(
    workload: Workload, arguments: LoaderArguments, worker_init: Callable[[int], None] | None
) -> dict[str, Any]:
    """Return the DataLoader's options that do not depend on the sampling: workers, prefetch depth, pinned memory."""
    import torch

    options: dict[str, Any] = {
        "num_workers": arguments.num_workers,
        "pin_memory": arguments.pin_memory and torch.cuda.is_available(),
        "worker_init_fn": _worker_init(workload, worker_init),
    }
    if arguments.num_workers > 0:
        options["prefetch_factor"] = arguments.prefetch_factor or 2
        options["persistent_workers"] = arguments.persistent_workers
    if workload.collate is not None:
        options["collate_fn"] = workload.collate
    return options


def _worker_init(workload: Workload, first: Callable[[int], None] | None) -> Callable[[int], None]:
    def initialise(worker_id: int) -> None:
        unbind_thread()
        if first is not None:
            first(worker_id)
        workload.worker_init(worker_id)

    return initialise


def outstanding_batches(iterator: Any) -> int:
    """Return how many batches a loader's iterator has requested from its workers and not yet given out.

    PyTorch's own count (`_tasks_outstanding`) leaves out those that came before their turn and wait for it.
    A batch that was copied to the device ahead of its turn counts too.
    """
    asked = int(getattr(iterator, "_send_idx", 0) - getattr(iterator, "_rcvd_idx", 0))
    return asked + int(getattr(iterator, "num_ahead", 0))


def ready_batches(iterator: Any) -> int:
    """Return how many requested batches are finished and wait to be taken (0 without workers)."""
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return 0
    received = sum(1 for info in getattr(iterator, "_task_info", {}).values() if len(info) == 2)
    try:
        return int(queue.qsize()) + received
    except NotImplementedError:  # macOS has no semaphore count
        return received
