"""The guard's check of the input: the same samples in the same order, whatever loads them."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded import NUM_SAMPLES, Guarded, neutral_choices
from torch.utils.data import Dataset, IterableDataset

from steptune.tuner.records import GuardCheck
from steptune.tuner.strategies.combine import make_plan
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.job import TrainingJob
from steptune.tuner.training.loader import build_loader
from steptune.tuner.trials import loader_check
from steptune.tuner.trials.loader_check import check_loader
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.workloads.batches import draw_batches, save_batches


class Samples(Dataset):
    """Each sample is a function of its index, and of a generator where there is augmentation."""

    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((16,), float(index)) + self._noise(), index % 4


class Loaded(Guarded):
    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        self._noise = noise

    def dataset(self) -> Any:
        return Samples(self._noise)


@pytest.fixture
def files(tmp_path: Path) -> StudyFiles:
    files = StudyFiles(tmp_path)
    save_batches(files.order_file, draw_batches(Loaded(), Samples(), seed=7, limit=30))
    return files


def job_of(
    files: StudyFiles, workload: Loaded | None = None, transform: Callable[[Any], Any] | None = None, **choices: Any
) -> TrainingJob:
    plan = make_plan(neutral_choices(**choices))
    if transform is not None:
        plan.dataset.append(lambda dataset, workload: transform(dataset))
    return assemble(workload or Loaded(), plan, device=torch.device("cpu"), batch_sampler=files.order(0, 1))


def checks(
    files: StudyFiles, workload: Loaded | None = None, transform: Callable[[Any], Any] | None = None, **choices: Any
) -> dict[str, GuardCheck]:
    job = job_of(files, workload, transform, **choices)
    return {check.name: check for check in check_loader(job, files, seed=0)}


ORDER, CONTENT = "order of samples", "content of samples"


class TestSame:
    @pytest.mark.parametrize(
        "choice",
        [
            {},
            {"num_workers": 2, "prefetch_factor": 3},
            {"num_workers": 2, "persistent_workers": True, "epochs_ahead": True},
        ],
        ids=["main process", "workers", "epochs ahead"],
    )
    def test_the_same_samples_pass(self, files: StudyFiles, choice: dict[str, Any]) -> None:
        found = checks(files, data_loading=choice)
        assert list(found) == [ORDER, CONTENT]
        assert all(check.passed and check.kind == "loader" for check in found.values())
        num_batches = 24 if choice.get("epochs_ahead") else 12
        assert f"of {num_batches} batches" in found[ORDER].detail, (
            "whole epochs are looked at, two of those begun ahead"
        )

    @pytest.mark.parametrize(
        "noise",
        [lambda: float(torch.rand(())), lambda: float(np.random.rand()), random.random],
        ids=["torch", "numpy", "python"],
    )
    @pytest.mark.parametrize("workers", [0, 1])
    def test_random_augmentation_is_compared_seeded_by_index(
        self, files: StudyFiles, noise: Callable[[], float], workers: int
    ) -> None:
        found = checks(files, Loaded(noise), data_loading={"num_workers": workers})
        assert found[CONTENT].passed
        assert found[CONTENT].detail.startswith("0 of 2 batches differ")

    def test_a_generator_of_the_dataset_s_own_cannot_be_compared_and_that_is_said(self, files: StudyFiles) -> None:
        own = np.random.default_rng(0)
        found = checks(files, Loaded(lambda: float(own.random())))
        assert found[CONTENT].passed
        assert "uses its own random generators, so only the order of samples could be checked" in found[CONTENT].detail
        assert found[ORDER].passed

    def test_the_generators_are_left_as_they_were(self, files: StudyFiles) -> None:
        """A candidate whose loader is checked draws the same numbers afterwards as one whose is not."""
        job = job_of(files, Loaded(random.random))
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        expected = (float(torch.rand(())), float(np.random.rand()), random.random())
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        check_loader(job, files, seed=0)
        assert (float(torch.rand(())), float(np.random.rand()), random.random()) == expected

    def test_a_cache_of_the_samples_passes(self, files: StudyFiles) -> None:
        assert all(check.passed for check in checks(files, dataset_cache={"where": "memory"}).values())

    def test_an_iterable_dataset_orders_itself_and_has_no_check(self, tmp_path: Path) -> None:
        class Stream(IterableDataset):
            def __iter__(self) -> Iterator[Any]:
                yield from (Samples()[index] for index in range(NUM_SAMPLES))

        class Streamed(Loaded):
            def dataset(self) -> Any:
                return Stream()

        assert checks(StudyFiles(tmp_path), Streamed()) == {}


class Altered(Dataset):
    def __init__(self, dataset: Any, alter: Callable[[Any], Any], index: Callable[[int], int] = lambda i: i) -> None:
        self._dataset, self._alter, self._index = dataset, alter, index

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._alter(self._dataset[self._index(index)])


class TestOtherContent:
    @pytest.mark.parametrize(
        "alter",
        [
            lambda sample: (sample[0] + 1e-6, sample[1]),
            lambda sample: (sample[0].half(), sample[1]),
            lambda sample: (sample[0].double(), sample[1]),
            lambda sample: (sample[0].reshape(4, 4), sample[1]),
            lambda sample: (sample[0], sample[1] ^ 1),
        ],
        ids=["other values", "half precision", "double precision", "another shape", "other labels"],
    )
    def test_is_rejected(self, files: StudyFiles, alter: Callable[[Any], Any]) -> None:
        found = checks(files, transform=lambda dataset: Altered(dataset, alter))
        assert not found[CONTENT].passed
        assert found[CONTENT].detail == "2 of 2 batches differ for the same indices and seeds"
        assert found[ORDER].passed

    def test_samples_of_other_indices_are_rejected(self, files: StudyFiles) -> None:
        shifted = checks(
            files, transform=lambda dataset: Altered(dataset, lambda s: s, lambda i: (i + 1) % NUM_SAMPLES)
        )
        assert not shifted[CONTENT].passed

    def test_frozen_augmentation_is_rejected(self, files: StudyFiles) -> None:
        """A cache of augmented samples trains on the same ones again and again."""
        found = checks(files, Loaded(random.random), transform=lambda d: Altered(Samples(), lambda sample: sample))
        assert not found[CONTENT].passed


class TestOtherOrder:
    @pytest.mark.parametrize(
        ("fault", "wrong"),
        [
            (lambda batches: batches[:-1], 1),
            (lambda batches: [*batches, batches[-1]], 1),
            (lambda batches: batches[::-1], 12),
            (lambda batches: [batch[::-1] for batch in batches], 12),
            (lambda batches: [[*batches[0][:-1], batches[0][0]], *batches[1:]], 1),
            (lambda batches: [], 12),
        ],
        ids=["batch dropped", "batch repeated", "batches reversed", "shuffled inside", "sample duplicated", "nothing"],
    )
    def test_is_rejected(
        self,
        files: StudyFiles,
        monkeypatch: pytest.MonkeyPatch,
        fault: Callable[[list[list[int]]], list[list[int]]],
        wrong: int,
    ) -> None:
        """The loader itself is at fault: it draws other batches than it was given."""

        def faulty(workload: Any, dataset: Any, arguments: Any, *, batch_sampler: Any) -> Any:
            if isinstance(dataset, loader_check._Indices):
                return fault(list(batch_sampler))
            return build_loader(workload, dataset, arguments, batch_sampler=batch_sampler)

        monkeypatch.setattr(loader_check, "build_loader", faulty)
        found = checks(files)
        assert not found[ORDER].passed
        assert found[ORDER].observed == wrong
        assert found[ORDER].detail == f"{wrong} of 12 batches contain different samples"
        assert found[CONTENT].passed


class Knobbed(Loaded):
    """Its knobs decide what is loaded, how it is batched, and how it is counted."""

    knobs = {"shift": (0.0, 1.0), "cut": (16, 8), "count": (1, 2), "harmless": (0, 1)}  # noqa: RUF012
    shift, cut, count, harmless = 0.0, 16, 1, 0

    def dataset(self) -> Any:
        return Samples(lambda: self.shift)

    def collate(self, samples: list[Any]) -> Any:
        return torch.stack([sample[: self.cut] for sample, _ in samples]), torch.tensor([label for _, label in samples])

    def num_units(self, batch: Any) -> int:
        return self.count * len(batch[0])


@pytest.mark.parametrize(
    ("knob", "value", "same"), [("shift", 1.0, False), ("cut", 8, False), ("count", 2, False), ("harmless", 1, True)]
)
def test_a_knob_that_promises_the_same_batches_is_held_to_it(
    files: StudyFiles, knob: str, value: float, same: bool
) -> None:
    workload, today = Knobbed(), getattr(Knobbed, knob)
    setattr(workload, knob, value)
    job = job_of(files, workload)
    found = {check.name: check for check in check_loader(job, files, 0, {knob: today})}
    assert found[CONTENT].passed is same
    assert getattr(job.workload, knob) == value, "it trains on as asked"
