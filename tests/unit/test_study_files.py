"""The files that the trials of a study share."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steptune.tuner.trials.study_files import MAX_FILLED_BATCHES, StudyFiles
from steptune.tuner.workloads.batches import load_batches, save_batches


@pytest.fixture
def files(tmp_path: Path) -> StudyFiles:
    return StudyFiles(tmp_path)


class TestOrder:
    @given(batches=st.lists(st.lists(st.integers(0, 2**40), max_size=6), max_size=6))
    def test_batches_of_any_sizes_come_back(
        self, tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]]
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "order.npz"
        save_batches(path, batches)
        assert load_batches(path) == batches

    def test_a_dataset_that_samples_itself_has_none(self, files: StudyFiles) -> None:
        assert files.order(0, 1) is None

    def test_ranks_share_each_batch_without_overlap(self, files: StudyFiles) -> None:
        save_batches(files.order_file, [[1, 2, 3, 4], [5, 6, 7, 8]])
        parts = [next(iter(files.order(rank, 2))) for rank in range(2)]  # type: ignore[arg-type]
        assert parts == [[1, 3], [2, 4]]

    def test_samples_that_windows_touch_are_listed_once_in_order(self, files: StudyFiles) -> None:
        save_batches(files.order_file, [[3, 1], [1, 2], *([[9]] * MAX_FILLED_BATCHES), [77]])
        assert files.first_indices() == [3, 1, 2, 9]


class TestGuardBatches:
    BATCHES = (
        {"images": torch.arange(12.0).reshape(4, 3), "labels": torch.tensor([0, 1, 2, 3]), "name": "a"},
        {"images": torch.zeros(4, 3), "labels": torch.tensor([3, 2, 1, 0]), "name": "b"},
    )

    def test_come_back_with_their_structure(self, files: StudyFiles) -> None:
        files.save_guard_batches(list(self.BATCHES))
        found = files.guard_batches()
        for batch, expected in zip(found, self.BATCHES, strict=True):
            assert batch.keys() == expected.keys()
            assert torch.equal(batch["images"], expected["images"])
            assert torch.equal(batch["labels"], expected["labels"])
            assert batch["name"] == expected["name"]

    def test_training_on_them_does_not_change_the_file(self, files: StudyFiles) -> None:
        files.save_guard_batches(list(self.BATCHES))
        files.guard_batches()[0]["images"].zero_()
        assert torch.equal(files.guard_batches()[0]["images"], self.BATCHES[0]["images"])

    def test_ranks_see_the_parts_that_the_order_gives_them(self, files: StudyFiles) -> None:
        files.save_guard_batches(list(self.BATCHES))
        parts = [files.guard_batches(rank, 2)[0]["labels"].tolist() for rank in range(2)]
        assert parts == [[0, 2], [1, 3]]


def test_a_candidate_is_cold_until_it_was_compiled_in_this_study(files: StudyFiles, tmp_path: Path) -> None:
    assert files.is_cold("abc")
    files.mark_warm("abc")
    files.mark_warm("abc")
    assert not files.is_cold("abc")
    assert files.is_cold("other")
    assert StudyFiles(tmp_path / "another").is_cold("abc"), "caches belong to one study"


def test_every_trial_and_rank_has_a_trace_of_its_own(files: StudyFiles) -> None:
    paths = {files.trace(trial, rank) for trial in ("a", "b") for rank in (0, 1)}
    assert len(paths) == 4
    assert all(files.directory in path.parents for path in paths)
