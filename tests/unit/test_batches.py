"""The order of batches: fixed, seekable, the same for every trial."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SequentialSampler

from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.workloads.batches import EndlessBatches, draw_batches, epoch_batches, load_batches, save_batches
from steptune.tuner.workloads.workload import Workload


class Numbers(Workload):
    """Batches of four of as many samples as asked for."""

    global_batch = 4

    def __init__(self, *, drop_last: bool = True) -> None:
        self.drop_last = drop_last


class TestDrawing:
    def test_the_same_seed_gives_the_same_batches(self) -> None:
        assert draw_batches(Numbers(), range(20), 1, 12) == draw_batches(Numbers(), range(20), 1, 12)
        assert draw_batches(Numbers(), range(20), 1, 12) != draw_batches(Numbers(), range(20), 2, 12)

    def test_every_epoch_is_a_new_shuffle_of_every_sample(self) -> None:
        batches = draw_batches(Numbers(), range(20), 0, 10)
        epochs = [list(chain(*batches[start : start + 5])) for start in (0, 5)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 2
        assert epochs[0] != epochs[1]

    def test_stops_at_the_limit_within_an_epoch(self) -> None:
        assert len(draw_batches(Numbers(), range(20), 0, 7)) == 7

    @pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
    def test_the_last_smaller_batch_is_as_the_workload_says(self, drop_last: bool, sizes: list[int]) -> None:
        batches = list(epoch_batches(Numbers(drop_last=drop_last), range(10), 0, 0))
        assert [len(batch) for batch in batches] == sizes

    def test_a_dataset_smaller_than_one_batch_is_refused(self) -> None:
        with pytest.raises(WorkloadRejectedError, match=r"has 3 samples, fewer than one batch of 4: give more data"):
            draw_batches(Numbers(), range(3), 0)

    def test_a_smaller_dataset_is_one_batch_where_the_last_is_kept(self) -> None:
        batches = draw_batches(Numbers(drop_last=False), range(3), 0, 2)
        assert [sorted(batch) for batch in batches] == [[0, 1, 2]] * 2

    def test_the_users_sampler_decides(self) -> None:
        class InOrder(Numbers):
            def sampler(self, dataset: Any) -> Any:
                return SequentialSampler(dataset)

        assert draw_batches(InOrder(), range(8), 0, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]

    def test_a_random_sampler_is_seeded(self) -> None:
        class Random(Numbers):
            def sampler(self, dataset: Any) -> Any:
                return RandomSampler(dataset)

        torch.manual_seed(1)
        first = draw_batches(Random(), range(40), 5)
        torch.manual_seed(2)
        assert draw_batches(Random(), range(40), 5) == first

    def test_the_users_batch_sampler_gives_batches_of_any_length(self) -> None:
        class Buckets(Numbers):
            def batch_sampler(self, dataset: Any) -> Any:
                return [[0], [1, 2, 3], (4, 5)]

        assert draw_batches(Buckets(), range(6), 0, 4) == [[0], [1, 2, 3], [4, 5], [0]]

    def test_samplers_are_told_the_epoch(self) -> None:
        class Epochs:
            epoch = -1

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Any:
                return iter([self.epoch] * 4)

        class Told(Numbers):
            def sampler(self, dataset: Any) -> Any:
                return Epochs()

        assert draw_batches(Told(), range(4), 0, 3) == [[0] * 4, [1] * 4, [2] * 4]


class TestEndless:
    def test_goes_round_and_can_be_moved(self) -> None:
        order = EndlessBatches([[0], [1], [2]])
        iterator = iter(order)
        assert list(islice(iterator, 4)) == [[0], [1], [2], [0]]
        order.seek(2)
        assert list(islice(iterator, 2)) == [[2], [0]]
        order.seek(4)
        assert next(iterator) == [1]

    def test_a_new_iterator_goes_on_where_the_order_is(self) -> None:
        order = EndlessBatches([[0], [1], [2]])
        next(iter(order))
        assert next(iter(order)) == [1]

    @given(st.integers(1, 4), st.lists(st.integers(0, 99), min_size=8, max_size=8))
    def test_the_ranks_share_out_each_batch(self, num_ranks: int, batch: list[int]) -> None:
        parts = [next(iter(EndlessBatches([batch], rank, num_ranks))) for rank in range(num_ranks)]
        assert sorted(chain(*parts)) == sorted(batch)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1

    def test_ranks_that_are_more_than_the_samples_take_one_again(self) -> None:
        """Or they would leave out a step in which the others wait for them."""
        assert [next(iter(EndlessBatches([[7, 8]], rank, 5))) for rank in range(5)] == [[7], [8], [7], [8], [7]]


@given(st.lists(st.lists(st.integers(0, 2**62), max_size=5), min_size=1, max_size=5))
def test_batches_come_back_from_a_file(tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]]) -> None:
    path: Path = tmp_path_factory.mktemp("order") / "batches.npz"
    save_batches(path, batches)
    assert load_batches(path) == batches
