"""The loader: the samples of the baseline, in its order, whatever loads them."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_workloads import Line
from torch.utils.data import Dataset, IterableDataset

from steptune.tuner.strategies.dataset_cache.strategy import CachedDataset
from steptune.tuner.training.loader import build_loader, outstanding_batches, ready_batches
from steptune.tuner.training.plan import LoaderArguments
from steptune.tuner.workloads.batches import EndlessBatches


class Photos(Dataset):
    """Split into what is read (counted) and what is drawn at random."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 10

    def load(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        return {"image": torch.full((2,), float(index)), "name": f"photo {index}", "pid": os.getpid()}

    def augment(self, sample: dict[str, Any]) -> dict[str, Any]:
        sample["image"] += torch.rand(())  # in place, as augmentation often is
        return sample

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.augment(self.load(index))


class Whole(Dataset):
    """Deterministic, without a split."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads.append(index)
        return torch.full((2,), float(index))


class Lengths(Dataset):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), float(index))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(10.0))


class Four(Line):
    """Batches of four."""


WORKERS = [
    LoaderArguments(),
    LoaderArguments(num_workers=1, prefetch_factor=4),
    LoaderArguments(num_workers=2, prefetch_factor=2, persistent_workers=True),
]
each_arguments = pytest.mark.parametrize("arguments", WORKERS, ids=["main", "one", "two"])


class TestOrder:
    @each_arguments
    def test_fixed_batches_come_in_their_order(self, arguments: LoaderArguments) -> None:
        order = [[3, 1], [0, 2, 9], [5]]
        loader = build_loader(Four(), Whole(), arguments, batch_sampler=order)
        assert [batch[:, 0].tolist() for batch in loader] == order

    @each_arguments
    def test_a_second_epoch_is_loaded_again(self, arguments: LoaderArguments) -> None:
        loader = build_loader(Four(), Whole(), arguments, batch_sampler=[[1], [2]])
        assert [[int(b[0, 0]) for b in loader] for _ in range(2)] == [[1, 2]] * 2

    @each_arguments
    def test_an_endless_order_is_sought_while_it_runs(self, arguments: LoaderArguments) -> None:
        """Batches that the workers hold already come first, and no more than the plan's capacity."""
        order = EndlessBatches([[index] for index in range(10)])
        iterator = iter(build_loader(Four(), Whole(), arguments, batch_sampler=order))
        assert int(next(iterator)[0, 0]) == 0
        order.seek(7)
        following = [int(next(iterator)[0, 0]) for _ in range(arguments.capacity + 2)]
        assert 7 in following
        jump = following.index(7)
        assert following[:jump] == list(range(1, jump + 1))
        assert jump <= arguments.capacity
        assert following[jump:] == [(7 + step) % 10 for step in range(len(following) - jump)]

    @each_arguments
    def test_the_users_own_sampler_is_taken(self, arguments: LoaderArguments) -> None:
        class Backwards(Four):
            def sampler(self, dataset: Any) -> Any:
                return range(len(dataset) - 1, -1, -1)

        loader = build_loader(Backwards(), Whole(), arguments)
        assert [batch[:, 0].tolist() for batch in loader] == [[9, 8, 7, 6], [5, 4, 3, 2]]

    def test_a_batch_sampler_of_the_user_comes_before_their_sampler(self) -> None:
        class Own(Four):
            def batch_sampler(self, dataset: Any) -> Any:
                return [[4, 2], [0]]

        loader = build_loader(Own(), Whole(), LoaderArguments())
        assert [batch[:, 0].tolist() for batch in loader] == [[4, 2], [0]]

    def test_without_a_sampler_all_samples_are_shuffled(self) -> None:
        class Shuffled(Four):
            drop_last = False

            def sampler(self, dataset: Any) -> None:
                return None

        torch.manual_seed(0)
        seen = [int(value) for batch in build_loader(Shuffled(), Whole(), LoaderArguments()) for value in batch[:, 0]]
        assert sorted(seen) == list(range(10))
        assert seen != list(range(10))

    @pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
    @pytest.mark.parametrize("dataset", [Whole(), Stream()], ids=["map", "stream"])
    def test_the_last_smaller_batch_is_as_the_workload_says(
        self, dataset: Any, drop_last: bool, sizes: list[int]
    ) -> None:
        workload = Four()
        workload.drop_last = drop_last
        assert [len(batch) for batch in build_loader(workload, dataset, LoaderArguments())] == sizes

    def test_ranks_share_the_samples_and_the_batch(self) -> None:
        class Shuffled(Four):
            def sampler(self, dataset: Any) -> None:
                return None

        seen = []
        for rank in range(2):
            for batch in build_loader(Shuffled(), Whole(), LoaderArguments(), rank=rank, num_ranks=2):
                assert len(batch) == 2
                seen += [int(value) for value in batch[:, 0]]
        assert len(set(seen)) == len(seen) == 8


class TestArguments:
    @each_arguments
    def test_samples_of_different_lengths_are_collated_by_the_user(self, arguments: LoaderArguments) -> None:
        class Padded(Four):
            def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
                return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1.0)

        loader = build_loader(Padded(), Lengths(), arguments, batch_sampler=[[0, 2], [1]])
        assert [batch.tolist() for batch in loader] == [[[0.0, -1.0, -1.0], [2.0, 2.0, 2.0]], [[1.0, 1.0]]]

    def test_workers_run_both_initialisers_first_ours(self) -> None:
        class Initialised(Four):
            def worker_init(self, worker_id: int) -> None:
                os.environ["STEPTUNE_TEST_CALLS"] += f" user {worker_id}"

        class Says(Dataset):
            def __len__(self) -> int:
                return 1

            def __getitem__(self, index: int) -> str:
                return os.environ["STEPTUNE_TEST_CALLS"]

        def ours(worker_id: int) -> None:
            os.environ["STEPTUNE_TEST_CALLS"] = f"ours {worker_id}"

        loader = build_loader(
            Initialised(), Says(), LoaderArguments(num_workers=1), batch_sampler=[[0]], worker_init=ours
        )
        assert next(iter(loader)) == ["ours 0 user 0"]
        assert "STEPTUNE_TEST_CALLS" not in os.environ

    def test_what_workers_hold_is_counted(self) -> None:
        order = EndlessBatches([[0]])
        arguments = LoaderArguments(num_workers=1, prefetch_factor=3)
        iterator = iter(build_loader(Four(), Whole(), arguments, batch_sampler=order))
        next(iterator)
        assert outstanding_batches(iterator) == arguments.capacity == 3
        assert 0 <= ready_batches(iterator) <= 3
        alone = iter(build_loader(Four(), Whole(), LoaderArguments(), batch_sampler=order))
        assert (outstanding_batches(alone), ready_batches(alone)) == (0, 0)

    def test_what_came_before_its_turn_is_held_too(self) -> None:
        """Windows begin where the old position ends: a batch that is not counted would be the first of the window."""
        other_is_ahead = multiprocessing.Event()

        class OutOfOrder(Dataset):
            def __getitem__(self, index: int) -> int:
                if index == 0:
                    other_is_ahead.wait()
                if index == 3:
                    other_is_ahead.set()
                return index

        arguments = LoaderArguments(num_workers=2, prefetch_factor=2)
        batches = [[number] for number in range(12)]
        iterator = iter(build_loader(Four(), OutOfOrder(), arguments, batch_sampler=batches))
        assert next(iterator).tolist() == [0]
        assert outstanding_batches(iterator) == arguments.capacity == 4


def cached(dataset: Any, where: str, directory: Path) -> CachedDataset:
    return CachedDataset(dataset, where, directory)


@pytest.mark.parametrize("where", ["memory", "disk"])
class TestCache:
    def test_gives_the_samples_of_the_baseline_bit_for_bit(self, where: str, tmp_path: Path) -> None:
        """Augmentation runs every time, on a copy, with the random numbers that it would have drawn."""
        cache = cached(Photos(), where, tmp_path)
        for _ in range(2):
            torch.manual_seed(5)
            expected = [Photos()[index] for index in (3, 3, 8)]
            torch.manual_seed(5)
            found = [cache[index] for index in (3, 3, 8)]
            for one, other in zip(found, expected, strict=True):
                assert one.keys() == other.keys()
                assert torch.equal(one["image"], other["image"])
                assert one["name"] == other["name"]

    @pytest.mark.parametrize("kind", [Photos, Whole])
    def test_reads_each_sample_once(self, where: str, kind: type, tmp_path: Path) -> None:
        dataset = kind()
        cache = cached(dataset, where, tmp_path)
        for index in (1, 2, 1, 1, 2):
            cache[index]
        assert dataset.reads == [1, 2]
        assert len(cache) == 10

    def test_a_sample_changed_by_its_user_is_as_before_the_next_time(self, where: str, tmp_path: Path) -> None:
        cache = cached(Whole(), where, tmp_path)
        cache[4].add_(100)
        assert cache[4].tolist() == [4.0, 4.0]

    def test_filled_before_workers_start_none_of_them_reads(self, where: str, tmp_path: Path) -> None:
        cache = cached(Photos(), where, tmp_path)
        cache.fill(range(10))
        arguments = LoaderArguments(num_workers=2)
        loader = build_loader(Four(), cache, arguments, batch_sampler=[[0, 1], [2, 3], [4, 5]])
        assert {pid for batch in loader for pid in batch["pid"].tolist()} == {os.getpid()}


def test_a_disk_cache_is_shared_by_processes_that_come_later(tmp_path: Path) -> None:
    cached(Whole(), "disk", tmp_path).fill([1, 2])
    again = Whole()
    cache = cached(again, "disk", tmp_path)
    assert [cache[index].tolist() for index in (1, 2)] == [[1.0, 1.0], [2.0, 2.0]]
    assert again.reads == []
