"""The guard's batches of a candidate that makes other batches: the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import steptune
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.plan import BatchArguments, Plan
from steptune.tuner.trials.guard_batches import check_samples, concatenated, guard_batches, merged_numbers
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.workloads.batches import EndlessBatches, save_batches

NUM_STORED, BATCH = 8, 4
LENGTHS = [1 + (11 * k) % 23 for k in range(64)]


class Texts:
    lengths = LENGTHS

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((LENGTHS[index],), float(index + 1))


class Reading(steptune.Workload):
    global_batch = BATCH

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def dataset(self) -> Any:
        return Texts()

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch.unsqueeze(-1)).square().mean()


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(64.0).reshape(64, 1))


class Streaming(Reading):
    def dataset(self) -> Any:
        return Stream()

    collate = None


def stored(directory: Path, workload: Reading, arguments: BatchArguments, *, rank: int = 0, num_ranks: int = 1) -> Any:
    """A job with a plan, and the files of a study whose guard batches are the first of the order."""
    files = StudyFiles(directory)
    order = None
    if isinstance(workload, Streaming):
        batches = [torch.arange(64.0).reshape(-1, BATCH, 1)[k] for k in range(NUM_STORED)]
    else:
        indices = [list(range(k, k + BATCH)) for k in range(0, 64, BATCH)]
        save_batches(files.order_file, indices)
        order = EndlessBatches(indices, rank, num_ranks)
        batches = [workload.collate([Texts()[i] for i in batch]) for batch in indices[:NUM_STORED]]
    files.save_guard_batches(batches)
    job = assemble(
        workload,
        Plan(batches=arguments),
        device=torch.device("cpu"),
        rank=0,
        num_ranks=1,
        batch_sampler=order,
    )
    return job, files


def samples(batches: list[torch.Tensor]) -> list[int]:
    """Which samples: the first element of each row is the index and one."""
    return sorted(int(row[0]) - 1 for batch in batches for row in batch)


@given(st.integers(1, 12), st.integers(1, 20))
def test_every_stored_batch_is_in_a_merged_one(count: int, factor: int) -> None:
    groups = merged_numbers(count, factor)
    assert {number for group in groups for number in group} == set(range(count))
    assert {len(group) for group in groups} == {factor}


def test_a_plain_plan_takes_the_stored_ones(tmp_path: Path) -> None:
    job, files = stored(tmp_path, Reading(), BatchArguments())
    for found, wanted in zip(guard_batches(job, files, 0, 1), files.guard_batches(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_merged_ones_hold_the_same_samples_padded_together(tmp_path: Path, factor: int) -> None:
    job, files = stored(tmp_path, Reading(), BatchArguments(factor=factor))
    found = guard_batches(job, files, 0, 1)
    assert [len(batch) for batch in found] == [factor * BATCH] * (NUM_STORED // factor)
    assert samples(found) == list(range(NUM_STORED * BATCH))


def test_balanced_ones_hold_the_same_samples_by_length(tmp_path: Path) -> None:
    job, files = stored(tmp_path, Reading(), BatchArguments(pool_batches=4))
    found = guard_batches(job, files, 0, 1)
    assert samples(found) == list(range(NUM_STORED * BATCH))
    assert sum(batch.numel() for batch in found) < 0.8 * sum(batch.numel() for batch in files.guard_batches())


def test_ranks_share_them(tmp_path: Path) -> None:
    job, files = stored(tmp_path, Reading(), BatchArguments(factor=2, pool_batches=4))
    parts = [guard_batches(job, files, rank, 2) for rank in (0, 1)]
    assert samples(parts[0] + parts[1]) == list(range(NUM_STORED * BATCH))
    assert all(len(a) == len(b) == BATCH for a, b in zip(*parts, strict=True))


def test_those_of_a_stream_are_put_together(tmp_path: Path) -> None:
    job, files = stored(tmp_path, Streaming(), BatchArguments(factor=4))
    found = guard_batches(job, files, 0, 1)
    assert [tuple(batch.shape) for batch in found] == [(16, 1), (16, 1)]
    assert torch.equal(torch.cat(found).flatten(), torch.arange(32.0))


def test_nested_batches_are_put_together_leaf_by_leaf() -> None:
    first = {"x": torch.tensor([1, 2]), "scale": torch.tensor(3.0), "name": "a", "more": (torch.tensor([[5]]),)}
    second = {"x": torch.tensor([7, 8]), "scale": torch.tensor(3.0), "name": "a", "more": (torch.tensor([[6]]),)}
    found = concatenated([first, second])
    assert found["x"].tolist() == [1, 2, 7, 8]
    assert found["scale"] == 3.0
    assert found["name"] == "a"
    assert found["more"][0].tolist() == [[5], [6]]


class TestSamples:
    def test_a_plain_order_needs_no_check(self, tmp_path: Path) -> None:
        assert check_samples(stored(tmp_path, Reading(), BatchArguments())[0]) is None

    def test_a_regrouped_order_passes(self, tmp_path: Path) -> None:
        check = check_samples(stored(tmp_path, Reading(), BatchArguments(factor=3, pool_batches=2))[0])
        assert check is not None
        assert check.passed

    def test_a_lost_and_a_doubled_sample_are_counted(self, tmp_path: Path) -> None:
        job, _ = stored(tmp_path, Reading(), BatchArguments(pool_batches=4))
        batch = job.loader.batch_sampler.batches[1]
        batch[0] = batch[1]
        check = check_samples(job)
        assert check is not None
        assert not check.passed
        assert check.observed == 2
