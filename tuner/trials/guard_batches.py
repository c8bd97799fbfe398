"""Batches of the guard, regrouped in the way in which a candidate regroups its own.

A candidate with other batches trains, in the guard too, on the very samples of the reference: the stored batches are
the first ones of the fixed order, and are regrouped here as the plan says.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

from steptune.tuner.records import GuardCheck
from steptune.tuner.training.regrouping import balance_pool
from steptune.tuner.training.structure import flatten, unflatten
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.workloads.batches import EndlessBatches, part_of_rank

if TYPE_CHECKING:
    from steptune.tuner.training.job import TrainingJob


def guard_batches(job: TrainingJob, files: StudyFiles, rank: int, num_ranks: int) -> list[Any]:
    """Return the guard's batches of one rank.

    Batches of a map-style dataset are collated anew, because separately padded batches cannot be concatenated; those of
    an iterable dataset are concatenated. Where a merged batch needs more batches than are stored, they are repeated.
    """
    arguments = job.plan.batches
    if arguments.is_plain:
        return files.guard_batches(rank, num_ranks)
    stored = files.guard_batches()
    groups = merged_numbers(len(stored), arguments.factor)
    order = files.order(0, 1)
    if order is None:
        parts = files.guard_batches(rank, num_ranks)
        return [concatenated([parts[number] for number in group]) for group in groups]
    batches = [list(chain.from_iterable(order.original[number] for number in group)) for group in groups]
    dataset, collate = job.loader.dataset, job.loader.collate_fn
    if arguments.pool_batches:
        batches = balance_pool(batches, job.loader.batch_sampler.length, num_ranks, seed=0)
    parts = [batch[part_of_rank(len(batch), rank, num_ranks)] for batch in batches]
    return [collate([dataset[index] for index in part]) for part in parts]


def merged_numbers(count: int, factor: int) -> list[list[int]]:
    """Choose which of `count` stored batches form each merged one; every stored batch is used."""
    return [[(start + k) % count for k in range(factor)] for start in range(0, count, factor)]


def concatenated(batches: list[Any]) -> Any:
    """Concatenate batches of one structure along their first dimension; take tensors without a dimension from the first
    batch.
    """
    import torch

    flat = [flatten(batch) for batch in batches]
    tensors = {
        path: torch.cat([other[path] for other, _ in flat]) if tensor.dim() else tensor
        for path, tensor in flat[0][0].items()
    }
    return unflatten(tensors, flat[0][1])


def check_samples(job: TrainingJob) -> GuardCheck | None:
    """Check that the regrouped order contains each of the user's samples equally often; return None if batches are not
    regrouped.
    """
    order = getattr(job.loader, "batch_sampler", None)
    if job.plan.batches.is_plain or not isinstance(order, EndlessBatches):
        return None
    before = Counter(chain.from_iterable(order.original[: order.num_positions]))
    after = Counter(chain.from_iterable(order.batches))
    wrong = sum(((before - after) + (after - before)).values())
    return GuardCheck(
        name="same samples as in the original order",
        kind="loader",
        passed=wrong == 0,
        observed=float(wrong),
        tolerance=0.0,
        detail=f"{wrong} samples occur a different number of times than in the original order",
    )
