"""Regrouping of samples into batches: several batches merged into one, and batches of samples of similar length.

Both work on lists of indices of the global batch, before the ranks take their parts (rank r of n takes every n-th index
from r on), so all ranks agree as long as they were given the same batches and the same seed.

Batches of similar length: the samples of a pool of batches are sorted by length, cut into batches of the same number of
samples, and the batches shuffled. Within a batch the longest samples are dealt first, each to the rank with the
least work so far ("longest processing time first": Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl.
Math. 17, 1969).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steptune.tuner.training.plan import BatchArguments
    from steptune.tuner.workloads.workload import Workload

Indices = list[int]
LengthOf = Callable[[int], int]


def merge(batches: Iterable[Sequence[int]], factor: int, *, keep_rest: bool) -> Iterator[Indices]:
    """Merge each `factor` consecutive batches into one.

    Args:
        keep_rest: Whether the last batches, if fewer than `factor`, form a smaller one; else they are left out.
    """
    source = iter(batches)
    while group := list(islice(source, factor)):
        if len(group) == factor or keep_rest:
            yield list(chain.from_iterable(group))


def balance_pool(batches: Sequence[Sequence[int]], length: LengthOf, num_ranks: int, seed: int) -> list[Indices]:
    """Regroup the samples of a pool into batches of the same sizes as before, each with samples of similar length, in
    random order.

    A smaller batch remains the last one.
    """
    generator = random.Random(seed)
    samples = list(chain.from_iterable(batches))
    generator.shuffle(samples)  # so that samples of equal length meet at random
    samples.sort(key=length)
    size = max(map(len, batches))
    rest = len(samples) % size
    # Which lengths the smaller batch has must not be always the same.
    start = generator.randrange(len(samples) // size + 1) * size if rest else 0
    last = samples[start : start + rest]
    kept = samples[:start] + samples[start + rest :]
    whole = [kept[k : k + size] for k in range(0, len(kept), size)]
    generator.shuffle(whole)
    return [deal(batch, length, num_ranks) for batch in (*whole, *([last] if last else []))]


def deal(batch: Sequence[int], length: LengthOf, num_ranks: int) -> Indices:
    """Reorder a batch so that the ranks' parts have about the same total length.

    Rank r of n gets every n-th sample from r on. Each part keeps its number of samples.
    """
    if num_ranks == 1:
        return list(batch)
    capacities = [len(range(rank, len(batch), num_ranks)) for rank in range(num_ranks)]
    parts: list[Indices] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    for index in sorted(batch, key=length, reverse=True):
        rank = min((r for r in range(num_ranks) if len(parts[r]) < capacities[r]), key=lambda r: (work[r], r))
        parts[rank].append(index)
        work[rank] += length(index)
    return [parts[position % num_ranks][position // num_ranks] for position in range(len(batch))]


def regroup(
    batches: Sequence[Sequence[int]], arguments: BatchArguments, length: LengthOf, num_ranks: int, seed: int
) -> list[Indices]:
    """Merge and balance a finite sequence of batches; leave out batches that do not fill a merged one."""
    merged = list(merge(batches, arguments.factor, keep_rest=False))
    pool = arguments.pool_batches
    if not pool:
        return merged
    pools = (merged[start : start + pool] for start in range(0, len(merged), pool))
    return list(
        chain.from_iterable(balance_pool(p, length, num_ranks, _mixed(seed, number)) for number, p in enumerate(pools))
    )


def padding_share(batches: Iterable[Sequence[int]], length: LengthOf, num_ranks: int = 1) -> float:
    """Return the share of padding if every rank pads its part of a batch to that part's longest sample."""
    real = padded = 0
    for batch in batches:
        for rank in range(num_ranks):
            lengths = [length(index) for index in batch[rank::num_ranks]]
            real += sum(lengths)
            padded += len(lengths) * max(lengths, default=0)
    return 1 - real / padded if padded else 0.0


class MergedBatches:
    """Batch sampler that merges several of the user's batches into one."""

    def __init__(self, batch_sampler: Any, factor: int, *, keep_rest: bool) -> None:
        self._batch_sampler = batch_sampler
        self._factor = factor
        self._keep_rest = keep_rest

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._batch_sampler, "set_epoch"):
            self._batch_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Indices]:
        return merge(self._batch_sampler, self._factor, keep_rest=self._keep_rest)

    def __len__(self) -> int:
        count = len(self._batch_sampler)
        return -(-count // self._factor) if self._keep_rest else count // self._factor


class BalancedBatches:
    """Batch sampler that groups samples of similar length from a map-style dataset. Each rank gets one part of every
    batch.

    Every index comes once an epoch, as the workload's own sampling gives it; without `drop_last` the last batch is
    filled up to a multiple of the ranks with samples that come twice, as DistributedSampler does. The order depends on
    `seed` and the epoch alone: every pass over it is the next epoch, unless `set_epoch` says which one.

    Args:
        workload: Workload whose sampler (or a shuffle) and global batch are used.
        length: Returns the length of a sample by its index.
    """

    def __init__(
        self,
        workload: Workload,
        dataset: Any,
        arguments: BatchArguments,
        length: LengthOf,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        seed: int = 0,
    ) -> None:
        self._workload = workload
        self._dataset = dataset
        self._arguments = arguments
        self.length = length
        self.num_ranks = num_ranks
        self._rank = rank
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Indices]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for batch in self.global_batches(epoch):
            yield batch[self._rank :: self.num_ranks]

    def __len__(self) -> int:
        size = self._batch_size
        count = len(self._dataset)
        return count // size if self._workload.drop_last else -(-count // size)

    def first_pool(self) -> tuple[list[Indices], list[Indices]]:
        """Return two groupings of the samples in the first pool of the first epoch: the regrouped batches, and the
        batches of the workload's own sampling.
        """
        count = self._arguments.pool_batches
        return list(islice(self.global_batches(0), count)), list(islice(self.unsorted_batches(0), count))

    def global_batches(self, epoch: int) -> Iterator[Indices]:
        """Yield an epoch's batches over all ranks."""
        source = self.unsorted_batches(epoch)
        number = 0
        while pool := list(islice(source, self._arguments.pool_batches)):
            yield from balance_pool(pool, self.length, self.num_ranks, _mixed(self._seed + epoch, number))
            number += 1

    def unsorted_batches(self, epoch: int) -> Iterator[Indices]:
        """Yield an epoch's batches as the workload's own sampling groups them; the samples are those of
        `global_batches`.
        """
        indices = self._indices(epoch)
        while batch := list(islice(indices, self._batch_size)):
            if len(batch) == self._batch_size:
                yield batch
            elif not self._workload.drop_last:
                missing = -len(batch) % self.num_ranks
                yield batch + (batch * self.num_ranks)[:missing]

    @property
    def _batch_size(self) -> int:
        return self._workload.global_batch * self._arguments.factor

    def _indices(self, epoch: int) -> Iterator[int]:
        import torch

        sampler = self._workload.sampler(self._dataset)
        if sampler is None:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            return iter(torch.randperm(len(self._dataset), generator=generator).tolist())
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return iter(sampler)


def _mixed(seed: int, number: int) -> int:
    return seed * 1_000_003 + number
