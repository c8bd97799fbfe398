"""Fixed order of batches: drawn once per study, the same for every trial, and seekable.

The user's own sampler (or a seeded shuffle) is run once, epoch after epoch, and its batches of
indices are kept. A trial walks through them endlessly, and a measured window can begin at any of
them, so that every candidate is timed on identical samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.workloads.workload import Workload

MAX_BATCHES = 1024


def draw_batches(workload: Workload, dataset: Any, seed: int, limit: int = MAX_BATCHES) -> list[list[int]]:
    """Return the first batches of indices of a map-style dataset, drawn over as many epochs as needed.

    Raises:
        WorkloadRejectedError: The dataset gives no full batch.
    """
    batches: list[list[int]] = []
    for epoch in range(limit):
        drawn = list(islice(epoch_batches(workload, dataset, seed, epoch), limit - len(batches)))
        batches.extend(drawn)
        if not drawn or len(batches) >= limit:
            break
    if not batches:
        raise WorkloadRejectedError(
            f"the dataset has {len(dataset)} samples, fewer than one batch of {workload.global_batch}: "
            "give more data or set a smaller global_batch"
        )
    return batches


def epoch_batches(workload: Workload, dataset: Any, seed: int, epoch: int) -> Iterator[list[int]]:
    """Yield one epoch's batches of indices, with generators seeded by `seed` and `epoch`."""
    seed_generators(seed * 1_000_003 + epoch)
    batch_sampler = workload.batch_sampler(dataset)
    if batch_sampler is not None:
        _set_epoch(batch_sampler, epoch)
        yield from (list(batch) for batch in batch_sampler)
        return
    sampler = workload.sampler(dataset)
    if sampler is None:
        indices: Iterator[int] = iter(np.random.permutation(len(dataset)).tolist())
    else:
        _set_epoch(sampler, epoch)
        indices = iter(sampler)
    while batch := list(islice(indices, workload.global_batch)):
        if len(batch) == workload.global_batch or not workload.drop_last:
            yield batch


def _set_epoch(sampler: Any, epoch: int) -> None:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


def seed_generators(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch."""
    import torch

    seed %= 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def part_of_rank(num_samples: int, rank: int, num_ranks: int) -> slice:
    """Return the slice of a batch that a rank takes: every n-th sample for n ranks, starting at the rank's number.

    Where there are fewer samples than ranks, the remaining ranks take samples a second time, as with torch's
    DistributedSampler: no rank may skip a step in which the others wait for it.
    """
    if rank < num_samples:
        return slice(rank, None, num_ranks)
    return slice(rank % num_samples, rank % num_samples + 1) if num_samples else slice(0, 0)


class EndlessBatches:
    """Batch sampler over a fixed list of batches; it never ends and can be moved to a position.

    `seek` takes effect on the next batch that the loader asks for; what it holds already comes
    first. A rank gets its part of each batch (`part_of_rank`).

    Args:
        batches: Indices of the batches of all ranks.
        merged: Number of the user's batches that make one batch here; positions count the user's.
        pool: Number of batches in a pool, within which the samples were rearranged; a position is moved back to the
            beginning of its pool.

    Attributes:
        original: The user's batches.
        length: Function that returns the length of a sample, if batches were arranged by it.
    """

    def __init__(
        self, batches: Sequence[Sequence[int]], rank: int = 0, num_ranks: int = 1, *, merged: int = 1, pool: int = 1
    ) -> None:
        self.batches = batches
        self.original = batches
        self.merged = merged
        self.pool = pool
        self.length: Callable[[int], int] | None = None
        self.num_ranks = num_ranks
        self._rank = rank
        self._next = 0

    @property
    def position(self) -> int:
        return self._next * self.merged

    def first_pool(self) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """Return the batches of the first pool, and the user's original batches that contain the same samples. A pool
        is a group of batches whose samples are rearranged among them.
        """
        return self.batches[: self.pool], self.original[: self.pool * self.merged]

    @property
    def num_positions(self) -> int:
        return len(self.batches) * self.merged

    def seek(self, position: int) -> None:
        number = position // self.merged % len(self.batches)
        self._next = number // self.pool * self.pool

    def regrouped(
        self, batches: Sequence[Sequence[int]], *, merged: int, pool: int, length: Callable[[int], int]
    ) -> EndlessBatches:
        """Return a sampler that groups the same samples into the given batches."""
        other = EndlessBatches(batches, self._rank, self.num_ranks, merged=merged, pool=pool)
        other.original, other.length = self.original, length
        return other

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            batch = self.batches[self._next]
            self._next = (self._next + 1) % len(self.batches)
            yield list(batch[part_of_rank(len(batch), self._rank, self.num_ranks)])

    def __len__(self) -> int:
        return len(self.batches)


def save_batches(path: Path, batches: Sequence[Sequence[int]]) -> None:
    """Write batches as one flat array with offsets."""
    offsets = np.cumsum([0, *(len(batch) for batch in batches)])
    flat = np.fromiter((index for batch in batches for index in batch), dtype=np.int64, count=int(offsets[-1]))
    np.savez(path, indices=flat, offsets=offsets)


def load_batches(path: Path) -> list[list[int]]:
    """Read batches that `save_batches` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        flat, offsets = archive["indices"], archive["offsets"]
    return [flat[start:end].tolist() for start, end in pairwise(offsets)]
