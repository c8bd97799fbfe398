"""Other batches from the same samples: merged, and sorted by length and dealt to the ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import SequentialSampler

import steptune
from steptune.tuner.strategies import strategy_named
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.plan import BatchArguments, Plan
from steptune.tuner.training.regrouping import (
    BalancedBatches,
    MergedBatches,
    balance_pool,
    deal,
    merge,
    padding_share,
    regroup,
)
from steptune.tuner.workloads.batches import EndlessBatches

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=120)


def work(batch: list[int], lengths: Any, rank: int, num_ranks: int) -> int:
    return sum(lengths[index] for index in batch[rank::num_ranks])


class TestMerge:
    @given(st.lists(st.lists(st.integers(), min_size=1), max_size=12), st.integers(1, 5))
    def test_keeps_samples_and_their_order(self, batches: list[list[int]], factor: int) -> None:
        merged = list(merge(batches, factor, keep_rest=True))
        assert list(chain.from_iterable(merged)) == list(chain.from_iterable(batches))
        assert len(merged) == -(-len(batches) // factor)

    def test_leaves_the_rest_out_where_it_is_asked_to(self) -> None:
        assert list(merge([[1], [2], [3]], 2, keep_rest=False)) == [[1, 2]]

    def test_a_batch_sampler_of_the_users_is_merged_epoch_by_epoch(self) -> None:
        class Epochs:
            def __init__(self) -> None:
                self.epoch = 0

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Any:
                return iter([[self.epoch], [1], [2]])

            def __len__(self) -> int:
                return 3

        merged = MergedBatches(Epochs(), 2, keep_rest=True)
        merged.set_epoch(7)
        assert list(merged) == [[7, 1], [2]]
        assert len(merged) == 2
        assert len(MergedBatches(Epochs(), 2, keep_rest=False)) == 1


class TestPool:
    @given(LENGTHS, st.integers(1, 9), st.integers(1, 4), st.integers(0, 10))
    def test_has_the_same_samples_in_batches_of_the_same_sizes(
        self, lengths: list[int], size: int, num_ranks: int, seed: int
    ) -> None:
        samples = list(range(len(lengths)))
        batches = [samples[k : k + size] for k in range(0, len(samples), size)]
        balanced = balance_pool(batches, lengths.__getitem__, num_ranks, seed)
        assert Counter(chain.from_iterable(balanced)) == Counter(samples)
        assert [len(batch) for batch in balanced] == [len(batch) for batch in batches]

    @given(LENGTHS, st.integers(1, 9), st.integers(0, 10))
    def test_whole_batches_hold_neighbours_in_length(self, lengths: list[int], size: int, seed: int) -> None:
        """No sample of another whole batch lies strictly between a batch's shortest and longest."""
        count = len(lengths) // size * size
        batches = [list(range(k, k + size)) for k in range(0, count, size)]
        if not batches:
            return
        balanced = balance_pool(batches, lengths.__getitem__, 1, seed)
        spans = sorted((min(map(lengths.__getitem__, b)), max(map(lengths.__getitem__, b))) for b in balanced)
        assert all(first[1] <= second[0] for first, second in pairwise(spans))

    def test_batches_come_in_random_order(self) -> None:
        batches = [[4 * k + j for j in range(4)] for k in range(16)]
        first, second = (balance_pool(batches, lambda index: index, 1, seed) for seed in (0, 1))
        assert sorted(map(min, first)) == [4 * k for k in range(16)]
        assert [min(b) for b in first] != sorted(min(b) for b in first)
        assert first != second

    def test_which_lengths_the_smaller_batch_has_is_drawn(self) -> None:
        found = {balance_pool([[0, 1, 2], [3, 4, 5], [6]], lambda index: index, 1, seed)[-1][0] for seed in range(40)}
        assert found == {0, 3, 6}

    def test_holds_far_less_padding_where_lengths_vary(self) -> None:
        """Lengths as of text (log-normal, spread 0.6): a shuffle pads about half, a pool of 64 batches hardly."""
        generator = random.Random(0)
        lengths = [max(1, int(generator.lognormvariate(5.0, 0.6))) for _ in range(64 * 32)]
        batches = [list(range(k, k + 32)) for k in range(0, len(lengths), 32)]
        before = padding_share(batches, lengths.__getitem__)
        after = padding_share(balance_pool(batches, lengths.__getitem__, 1, 0), lengths.__getitem__)
        assert before > 0.4
        assert after < 0.05


class TestDeal:
    @given(LENGTHS, st.integers(1, 8))
    def test_every_rank_gets_as_many_samples_as_before(self, lengths: list[int], num_ranks: int) -> None:
        batch = list(range(len(lengths)))
        dealt = deal(batch, lengths.__getitem__, num_ranks)
        assert sorted(dealt) == batch

    @given(st.integers(1, 30), st.integers(2, 4), st.data())
    def test_ranks_differ_by_no_more_than_the_longest_sample(self, each: int, num_ranks: int, data: Any) -> None:
        """The longest first, to the rank with the least work, as long as all have room: with equal numbers of
        samples, the last one of each rank may only narrow the difference or be forced, and it is among the shortest.
        """
        lengths = data.draw(st.lists(st.integers(1, 100), min_size=each * num_ranks, max_size=each * num_ranks))
        dealt = deal(list(range(len(lengths))), lengths.__getitem__, num_ranks)
        loads = [work(dealt, lengths, rank, num_ranks) for rank in range(num_ranks)]
        unsorted = [sum(sorted(lengths, reverse=True)[r * each : (r + 1) * each]) for r in range(num_ranks)]
        assert max(loads) - min(loads) <= max(unsorted) - min(unsorted)

    def test_balances_lengths_that_vary(self) -> None:
        generator = random.Random(0)
        lengths = [int(generator.lognormvariate(5.0, 0.6)) + 1 for _ in range(64)]
        dealt = deal(list(range(64)), lengths.__getitem__, 4)
        loads = [work(dealt, lengths, rank, 4) for rank in range(4)]
        assert max(loads) < 1.01 * sum(loads) / 4


class TestPadding:
    def test_is_what_each_rank_adds_to_its_longest_sample(self) -> None:
        lengths = [4, 1, 2, 1]
        assert padding_share([[0, 1, 2, 3]], lengths.__getitem__) == 1 - 8 / 16
        assert padding_share([[0, 1, 2, 3]], lengths.__getitem__, 2) == 1 - 8 / 10
        assert padding_share([], lengths.__getitem__) == 0.0


class TestOrder:
    def test_merges_first_and_balances_then(self) -> None:
        lengths = list(range(16))
        batches = [[15, 0], [14, 1], [13, 2], [12, 3], [11, 4], [10, 5], [9, 6], [8, 7], [0, 0]]
        found = regroup(batches, BatchArguments(factor=2, pool_batches=2), lengths.__getitem__, 1, seed=0)
        assert [len(batch) for batch in found] == [4, 4, 4, 4]
        assert sorted(map(sorted, found[:2])) == [[0, 1, 2, 3], [12, 13, 14, 15]]

    def test_positions_count_the_users_batches(self) -> None:
        order = EndlessBatches([[k] for k in range(8)])
        merged = order.regrouped([[0, 1], [2, 3], [4, 5], [6, 7]], merged=2, pool=1, length=int)
        merged.seek(5)
        assert next(iter(merged)) == [4, 5]
        assert merged.position == 6
        assert merged.num_positions == 8
        assert merged.original == order.batches

    def test_a_position_inside_a_pool_is_moved_to_its_beginning(self) -> None:
        order = EndlessBatches([[k] for k in range(8)], pool=3)
        order.seek(7)
        assert next(iter(order)) == [6]
        order.seek(13)
        assert next(iter(order)) == [3]


class Texts(torch.utils.data.Dataset):
    """Sequences of ones of known lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(self.lengths[index])


class Reading(steptune.Workload):
    """Sums padded texts; a token is a one."""

    global_batch = 4
    sample_unit = "token"

    def __init__(self, lengths: list[int], **attributes: Any) -> None:
        self._lengths = lengths
        for name, value in attributes.items():
            setattr(self, name, value)

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def dataset(self) -> Any:
        return Texts(self._lengths)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch.unsqueeze(-1)).square().mean()

    def num_units(self, batch: torch.Tensor) -> int:
        return int(batch.sum())


class Sequential(Reading):
    def sampler(self, dataset: Any) -> Any:
        return SequentialSampler(dataset)


def epoch_of(workload: Reading, arguments: BatchArguments, epoch: int, **ranks: int) -> list[list[int]]:
    dataset = workload.dataset()
    sampler = BalancedBatches(workload, dataset, arguments, lambda index: workload.length(dataset, index), **ranks)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(sampler) == len(batches)
    return batches


class TestEpochs:
    @given(LENGTHS, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.booleans())
    def test_every_index_comes_once_an_epoch(
        self, lengths: list[int], pool: int, num_ranks: int, epoch: int, drop_last: bool
    ) -> None:
        """Without `drop_last` fewer samples than there are ranks come twice; with it the rest is left out."""
        size = 2 * num_ranks
        workload = Reading(lengths, global_batch=size, drop_last=drop_last)
        arguments = BatchArguments(pool_batches=pool)
        ranks = [epoch_of(workload, arguments, epoch, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        assert len({len(batches) for batches in ranks}) == 1, "ranks have different numbers of batches"
        seen = Counter(index for batches in ranks for batch in batches for index in batch)
        if drop_last:
            assert set(seen.values()) <= {1}
            assert len(seen) == len(lengths) // size * size
        else:
            assert set(seen) == set(range(len(lengths)))
            assert sum(seen.values()) - len(lengths) < num_ranks
        assert all(batch for batches in ranks for batch in batches)

    def test_is_decided_by_seed_and_epoch_alone(self) -> None:
        workload, arguments = Reading(list(range(1, 41))), BatchArguments(pool_batches=3)
        first = epoch_of(workload, arguments, 2)
        torch.manual_seed(99)
        random.seed(99)
        assert epoch_of(workload, arguments, 2) == first
        assert epoch_of(workload, arguments, 3) != first
        assert epoch_of(workload, arguments, 2, seed=1) != first

    def test_ranks_agree_on_every_batch(self) -> None:
        """The ranks together hold a batch of neighbours in length."""
        workload, arguments = Reading(list(range(1, 41)), global_batch=8), BatchArguments(pool_batches=5)
        left, right = (epoch_of(workload, arguments, 0, rank=rank, num_ranks=2) for rank in (0, 1))
        for a, b in zip(left, right, strict=True):
            together = sorted(a + b)
            assert together == list(range(together[0], together[0] + 8))

    def test_every_pass_is_the_next_epoch(self) -> None:
        workload = Reading(list(range(1, 41)))
        dataset = workload.dataset()
        sampler = BalancedBatches(workload, dataset, BatchArguments(pool_batches=3), dataset.lengths.__getitem__)
        passes = [list(sampler), list(sampler)]
        assert passes[0] != passes[1]
        assert passes == [epoch_of(workload, BatchArguments(pool_batches=3), epoch) for epoch in (0, 1)]

    def test_the_workloads_own_sampler_decides_what_is_in_a_pool(self) -> None:
        batches = epoch_of(Sequential([9, 1, 8, 2, 7, 3, 6, 4]), BatchArguments(pool_batches=2), 0)
        assert sorted(map(sorted, batches)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
        first_pool = epoch_of(Sequential([9, 1, 8, 2] * 4), BatchArguments(pool_batches=2), 0)[:2]
        assert sorted(chain.from_iterable(first_pool)) == list(range(8))


class TestJob:
    def build(self, workload: Reading, batch_sampler: Any = None, **arguments: int) -> Any:
        plan = Plan(batches=BatchArguments(**arguments))
        return assemble(workload, plan, device=torch.device("cpu"), batch_sampler=batch_sampler)

    @pytest.mark.parametrize("own_order", [False, True])
    def test_reads_every_token_once_with_less_padding(self, own_order: bool) -> None:
        lengths = [1 + (7 * k) % 50 for k in range(64)]
        order = EndlessBatches([list(range(k, k + 4)) for k in range(0, 64, 4)]) if own_order else None
        job = self.build(Reading(lengths), order, pool_batches=16)
        batches = [batch for batch, _ in zip(job, range(16), strict=False)]
        assert sum(job.workload.num_units(batch) for batch in batches) == sum(lengths)
        padded = sum(batch.numel() for batch in batches)
        assert sum(lengths) / padded > 0.9
        evidence = strategy_named("length_balancing").evidence(job)
        assert evidence["padding_after"] == pytest.approx(1 - sum(lengths) / padded) or not own_order
        assert evidence["padding_after"] < 0.1 < evidence["padding_before"]

    def test_a_workload_that_knows_lengths_otherwise_is_asked(self) -> None:
        class Asked(Reading):
            def length(self, dataset: Any, index: int) -> int:
                return -index

        job = self.build(Asked([3] * 16), pool_batches=4)
        assert [sorted(b) for b in sorted(job.loader.batch_sampler.first_pool()[0], key=min)] == [
            list(range(k, k + 4)) for k in range(0, 16, 4)
        ]

    @pytest.mark.parametrize("make", [lambda: None, lambda: EndlessBatches([[k, k + 1] for k in range(0, 16, 2)])])
    def test_a_factor_makes_larger_batches(self, make: Callable[[], Any]) -> None:
        job = self.build(Reading([3] * 16, global_batch=2), make(), factor=3)
        assert [len(batch) for batch, _ in zip(job, range(2), strict=False)] == [6, 6]
