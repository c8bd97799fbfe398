"""The prefetching loader: the loader's batches in its order, one ahead, and nothing past its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from builders import sample_environment, sample_facts
from tiny_workloads import Everything, image_data
from torch.utils.data import DataLoader, TensorDataset

from steptune.tuner.records import Candidate
from steptune.tuner.strategies.combine import conflict, normalise
from steptune.tuner.strategies.device_prefetch.strategy import DevicePrefetch
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.loader import outstanding_batches
from steptune.tuner.training.plan import LoaderArguments, Plan
from steptune.tuner.training.prefetcher import PrefetchingLoader, SameStream, as_loaded
from steptune.tuner.trials.loader_check import check_loader
from steptune.tuner.trials.measure import Stepper, take_window
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.workloads.batches import EndlessBatches, save_batches


class Told:
    """A copy stream that writes down what happens on it."""

    def __init__(self) -> None:
        self.story: list[str] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.story.append("copying")
        yield
        self.story.append("copied")

    def hand_over(self, batch: Any) -> None:
        self.story.append(f"hand over {batch}")


class Source:
    """An iterable that counts how often it was asked, and may fail."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count = count
        self.error = error
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.asked += 1
        if self.asked <= self.count:
            return self.asked
        if self.error is not None:
            raise self.error
        raise StopIteration


def ahead(source: Any, **options: Any) -> PrefetchingLoader:
    return PrefetchingLoader(source, options.get("move", lambda batch: batch), options.get("stream", SameStream()))


class TestBatches:
    @pytest.mark.parametrize("count", [0, 1, 2, 5])
    def test_are_those_of_the_loader_in_its_order(self, count: int) -> None:
        assert list(ahead(range(count))) == list(range(count))

    def test_every_pass_begins_anew(self) -> None:
        loader = ahead([1, 2, 3])
        assert [list(loader), list(loader)] == [[1, 2, 3], [1, 2, 3]]

    def test_are_moved_once_each(self) -> None:
        moved: list[int] = []
        assert list(ahead(range(3), move=lambda batch: moved.append(batch) or -batch)) == [0, -1, -2]
        assert moved == [0, 1, 2]

    def test_the_next_copy_is_launched_before_a_batch_is_given_out(self) -> None:
        stream = Told()
        iterator = iter(ahead([1, 2], stream=stream))
        next(iterator)
        assert stream.story == ["copying", "copied", "hand over 1", "copying", "copied"]
        next(iterator)
        assert stream.story[5:] == ["hand over 2"]

    def test_one_is_ahead_until_the_last(self) -> None:
        source = Source(3)
        iterator = iter(ahead(source))
        assert (iterator.num_ahead, source.asked) == (0, 0)
        seen = [(batch, iterator.num_ahead, iterator.host) for batch in iterator]
        assert seen == [(1, 1, 1), (2, 1, 2), (3, 0, 3)]

    def test_nothing_is_asked_of_a_loader_that_has_ended(self) -> None:
        source = Source(2)
        iterator = iter(ahead(source))
        assert list(iterator) == [1, 2]
        assert source.asked == 3
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)
        assert source.asked == 3

    def test_what_the_loader_raises_comes_in_its_turn(self) -> None:
        iterator = iter(ahead(Source(2, ValueError("a broken file"))))
        assert next(iterator) == 1
        assert next(iterator) == 2
        with pytest.raises(ValueError, match="a broken file"):
            next(iterator)

    def test_what_moving_raises_comes_in_its_turn(self) -> None:
        def move(batch: int) -> int:
            if batch == 2:
                raise RuntimeError("no memory for it")
            return batch

        iterator = iter(ahead([1, 2], move=move))
        assert next(iterator) == 1
        with pytest.raises(RuntimeError, match="no memory"):
            next(iterator)


class TestLoader:
    def test_is_otherwise_the_loader(self) -> None:
        data = TensorDataset(torch.arange(6.0))
        loader = ahead(DataLoader(data, batch_size=2))
        assert len(loader) == 3
        assert loader.dataset is data
        assert loader.num_workers == 0

    def test_a_name_that_neither_has_is_missing(self) -> None:
        with pytest.raises(AttributeError, match="colour"):
            _ = ahead([1]).colour

    def test_the_batch_ahead_is_of_the_old_position(self) -> None:
        """So that moving a loader consumes it, untimed."""
        order = EndlessBatches([[0, 1], [2, 3], [4, 5], [6, 7]])
        iterator = iter(ahead(DataLoader(TensorDataset(torch.arange(8)), batch_sampler=order)))
        assert outstanding_batches(iterator) == 0
        assert next(iterator)[0].tolist() == [0, 1]
        order.seek(3)
        assert outstanding_batches(iterator) == 1
        assert [next(iterator)[0].tolist() for _ in range(2)] == [[2, 3], [6, 7]]

    def test_with_workers_those_in_flight_count_too(self) -> None:
        order = EndlessBatches([[0, 1], [2, 3], [4, 5], [6, 7]])
        loader = DataLoader(TensorDataset(torch.arange(8)), batch_sampler=order, num_workers=1, prefetch_factor=2)
        iterator = iter(ahead(loader))
        next(iterator)
        assert outstanding_batches(iterator) == 3
        assert len(iterator._workers) == 1


def job_of(workload: Any, directory: Any, **arguments: Any) -> Any:
    plan = Plan()
    DevicePrefetch().contribute(plan, {"ahead": True, "as_bytes": False, **arguments})
    workload.directory = directory
    torch.manual_seed(0)
    return assemble(workload, plan, device=torch.device("cpu"))


class TestJob:
    def test_trains_as_without_bit_for_bit(self, tmp_path: Any) -> None:
        torch.manual_seed(0)
        plain = assemble(Everything(), Plan(), device=torch.device("cpu"))
        prefetching = job_of(Everything(), tmp_path)
        assert [float(plain.step(b)) for b in plain] == [float(prefetching.step(b)) for b in prefetching]

    def test_shows_that_it_is_ahead(self, tmp_path: Any) -> None:
        job = job_of(Everything(), tmp_path)
        strategy = DevicePrefetch()
        assert strategy.evidence(job) == {"ahead": True, "as_bytes": False}
        assert not strategy.took_effect(strategy.evidence(job), strategy.defaults).took

    def test_a_window_counts_the_batch_that_it_times(self, tmp_path: Any) -> None:
        """Batches of different length: the one ahead is another one."""
        order = EndlessBatches([[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]])
        plan = Plan(loader=LoaderArguments(device_prefetch=True))
        job = assemble(Everything(), plan, device=torch.device("cpu"), batch_sampler=order)
        window = take_window(Stepper(job, order), round_number=0, position=2, num_steps=2, foreign_limit=1e9)
        assert window.num_samples == 3 + 4


class Pictures(Everything):
    """Images that are bytes, and floats only as they leave the dataset."""

    mean, deviation = 0.45, 0.25

    def dataset(self) -> Any:
        images, labels = image_data().tensors
        self.bytes = (images.clamp(-2, 2) * 60 + 128).to(torch.uint8)
        return TensorDataset(self.converted(self.bytes), labels)

    def converted(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() / 255 - self.mean) / self.deviation

    def byte_dataset(self, dataset: Any) -> Any:
        return TensorDataset(self.bytes, dataset.tensors[1])

    def from_bytes(self, batch: Any) -> Any:
        images, labels = batch
        return self.converted(images), labels


class Wrong(Pictures):
    """Forgets the mean."""

    def from_bytes(self, batch: Any) -> Any:
        images, labels = batch
        return images.float() / 255 / self.deviation, labels


class TestBytes:
    def test_are_loaded_and_converted_on_the_device(self, tmp_path: Any) -> None:
        job = job_of(Pictures(), tmp_path, as_bytes=True)
        iterator = iter(job)
        images, _ = next(iterator)
        assert images.dtype is torch.float32
        assert as_loaded(iterator, None)[0].dtype is torch.uint8
        assert DevicePrefetch().evidence(job) == {"ahead": True, "as_bytes": True}

    def test_train_as_floats(self, tmp_path: Any) -> None:
        torch.manual_seed(0)
        plain = assemble(Pictures(), Plan(), device=torch.device("cpu"))
        job = job_of(Pictures(), tmp_path, as_bytes=True)
        losses = [float(job.step(batch)) for batch in job]
        assert losses == pytest.approx([float(plain.step(batch)) for batch in plain], rel=1e-5)

    @pytest.mark.parametrize(("workload", "passes"), [(Pictures, True), (Wrong, False)])
    def test_the_guard_compares_them_with_the_dataset_s_own(self, workload: Any, passes: bool, tmp_path: Any) -> None:
        files = StudyFiles(tmp_path)
        files.make_folders()
        save_batches(files.order_file, [[0, 1, 2, 3], [4, 5, 6, 7]])
        checks = {check.name: check for check in check_loader(job_of(workload(), tmp_path, as_bytes=True), files, 0)}
        assert checks["content of samples"].passed
        assert checks["conversion from bytes"].passed is passes
        assert bool(checks["conversion from bytes"].detail) is not passes


class TestCombination:
    AHEAD = Candidate(choices={"device_prefetch": {"ahead": True}})

    def reason(self, candidate: Candidate) -> str | None:
        return conflict(candidate, sample_environment(), sample_facts(current={}))

    def test_goes_with_pinned_memory_only(self) -> None:
        reason = self.reason(self.AHEAD)
        assert reason is not None
        assert "only copies from pinned memory are asynchronous" in reason
        assert self.reason(self.AHEAD.with_choice("data_loading", {"pin_memory": True})) is None

    def test_bytes_mean_nothing_where_nothing_is_ahead(self) -> None:
        candidate = Candidate(choices={"device_prefetch": {"as_bytes": True}})
        assert normalise(candidate, sample_facts(current={})).is_baseline
