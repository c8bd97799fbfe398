"""Calls of exported code in a training loop of another library."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import steptune
from steptune.tuner.errors import ChoiceError


class Numbers(Dataset[Any]):
    def __init__(self, first: int, length: int = 4) -> None:
        self.first = first
        self.length = length
        self.num_reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_reads += 1
        return {"x": torch.tensor(float(self.first + index)), "name": str(index)}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield from range(3)


def values(dataset: Any) -> list[float]:
    return [float(dataset[index]["x"]) for index in range(len(dataset))]


def test_two_datasets_in_one_folder_keep_their_own_samples(tmp_path: Path) -> None:
    """A training and a validation set go through the same call of an export."""
    training, validation = (steptune.cached(Numbers(first), "disk", directory=tmp_path) for first in (0, 100))
    assert (values(training), values(validation)) == ([0, 1, 2, 3], [100, 101, 102, 103])


def test_a_later_process_reads_the_files_and_one_that_decodes_otherwise_does_not(tmp_path: Path) -> None:
    steptune.cached(Numbers(0), "disk", directory=tmp_path, fill=True)
    again = Numbers(0)
    assert values(steptune.cached(again, "disk", directory=tmp_path)) == [0, 1, 2, 3]
    assert again.num_reads == 1
    assert values(steptune.cached(Numbers(50), "disk", directory=tmp_path)) == [50, 51, 52, 53]
    assert values(steptune.cached(Numbers(0, length=5), "disk", directory=tmp_path)) == [0, 1, 2, 3, 4]


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ChoiceError, match=r"`where` must be \"memory\" or \"disk\", got 'ram'"):
        steptune.cached(Numbers(0), "ram")  # type: ignore[arg-type]


def test_a_dataset_without_an_index_is_refused() -> None:
    with pytest.raises(ChoiceError, match="requires a map-style dataset with __getitem__ and __len__, got Stream"):
        steptune.cached(Stream())


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0), **options)


KEPT = {"num_workers": 1, "persistent_workers": True, "collate_fn": lambda samples: [int(s["x"]) for s in samples]}


def test_epochs_ahead_give_the_same_batches_and_begin_one_epoch_with_idle_workers() -> None:
    plain, ahead = loader_of(Numbers(0), **KEPT), steptune.epochs_ahead(loader_of(Numbers(0), **KEPT))
    assert [list(ahead) for _ in range(3)] == [list(plain) for _ in range(3)]
    assert (getattr(ahead, "num_restarts"), len(ahead)) == (1, len(plain))  # noqa: B009
    assert steptune.epochs_ahead(ahead) is ahead
    known = weakref.ref(ahead)
    del ahead
    assert known() is None, "workers of a loader in a cycle end late, and one after another"


def test_a_loader_with_epochs_ahead_can_be_made_again_with_another_sampler() -> None:
    """As Lightning does it for several ranks: each has its own samples."""
    loader = steptune.epochs_ahead(loader_of(Numbers(0), **KEPT))
    split = [DistributedSampler(loader.dataset, 2, rank, shuffle=False) for rank in range(2)]
    ranks = [type(loader)(loader.dataset, batch_size=2, sampler=sampler, **KEPT) for sampler in split]
    assert [[list(rank) for _ in range(2)] for rank in ranks] == [[[[0, 2]]] * 2, [[[1, 3]]] * 2]


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: loader_of(Numbers(0)), "requires workers that are kept, got num_workers=0"),
        (lambda: loader_of(Numbers(0), num_workers=1), "persistent_workers=False: set persistent_workers=True"),
        (lambda: DataLoader(Stream(), num_workers=1, persistent_workers=True), "of a map-style dataset"),
        (lambda: DataLoader(Numbers(0), batch_size=None, num_workers=1, persistent_workers=True), "with batches"),
        (lambda: [1, 2], "got list"),
    ],
)
def test_epochs_ahead_need_workers_that_are_kept_and_batches_of_a_known_order(loader: Any, words: str) -> None:
    with pytest.raises(ChoiceError, match=words):
        steptune.epochs_ahead(loader())


def test_a_model_that_repeats_no_block_is_refused_rather_than_left_as_it_is() -> None:
    with pytest.raises(ChoiceError, match="Linear has none"):
        steptune.compile_blocks(torch.nn.Linear(2, 2))
