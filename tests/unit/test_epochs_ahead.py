"""Epochs ahead: workers begin the next epoch before the current one ends, and no sample comes at another place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from builders import sample_environment, sample_facts
from msgspec.structs import replace
from tiny_workloads import Line
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from steptune.tuner.records import Candidate
from steptune.tuner.strategies.api import Supported
from steptune.tuner.strategies.combine import normalise
from steptune.tuner.strategies.data_loading.strategy import SHORT_EPOCH_STEPS, DataLoading
from steptune.tuner.training.assemble import assemble
from steptune.tuner.training.epochs_ahead import GIVEN_UP_AFTER, EpochsAhead
from steptune.tuner.training.loader import build_loader, outstanding_batches
from steptune.tuner.training.plan import LoaderArguments, Plan
from steptune.tuner.trials import measure
from steptune.tuner.workloads.batches import EndlessBatches, seed_generators

WORKERS = LoaderArguments(num_workers=2, prefetch_factor=2, persistent_workers=True)
AHEAD = LoaderArguments(num_workers=2, prefetch_factor=2, persistent_workers=True, epochs_ahead=True)
NUM_EPOCHS = 3


class Numbers(Dataset):
    """Each sample is its index."""

    def __init__(self, length: int = 22) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, torch.Tensor):
            return index.sum().item()
        if index < 0:
            raise ValueError("a broken sample")
        return index


class Shuffled(Line):
    """Leaves the order to the loader: drawn from torch's own generator."""

    drop_last = False

    def sampler(self, dataset: Any) -> Any:
        return None


class OwnIterator(Sampler):
    """Is its own iterator, which begins a pass where it is asked for one; each pass goes on where the last ended."""

    def __init__(self, dataset: Any) -> None:
        self.next, self.left, self.length = 0, 0, len(dataset)

    def __iter__(self) -> OwnIterator:
        self.left = 6
        return self

    def __next__(self) -> list[int]:
        if not self.left:
            raise StopIteration
        self.left -= 1
        self.next += 1
        return [self.next % self.length]


class Pairs(Sampler):
    """Indices that are tensors of two numbers."""

    def __init__(self, dataset: Any) -> None:
        self.length = len(dataset)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for _ in range(6):
            yield [torch.randint(self.length, (2,))]


Sampling = Callable[[Any], Any]


class Sampled(Shuffled):
    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def batch_sampler(self, dataset: Any) -> Any:
        return self._sampling(dataset)


class InPlace(Sampler):
    """Shuffles a list of its own, by Python's generator: a pass changes the sampler."""

    def __init__(self, dataset: Any) -> None:
        self.order = list(range(len(dataset)))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


class Counting(Sampler):
    """Counts its epochs, and on by itself when one has ended, as Accelerate's seeded sampler does."""

    def __init__(self, dataset: Any) -> None:
        self.length, self.epoch = len(dataset), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        yield from order
        self.epoch += 1


class Lazily(Sampler):
    """Draws each index when it is asked for, by NumPy's generator."""

    def __init__(self, dataset: Any) -> None:
        self.length = len(dataset)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(np.random.randint(self.length))


def batched(make: Sampling, size: int = 4) -> Sampling:
    return lambda dataset: BatchSampler(make(dataset), size, drop_last=False)


def split(dataset: Any) -> Any:
    return DistributedSampler(dataset, 2, 1)


def seeded(dataset: Any) -> Any:
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(5))


SAMPLINGS: dict[str, Sampling] = {
    "sequential": batched(SequentialSampler),
    "shuffled": batched(RandomSampler),
    "own generator": batched(seeded),
    "subset": batched(lambda dataset: SubsetRandomSampler(range(3, 20, 2))),
    "split over ranks": batched(split),
    "in place": batched(InPlace),
    "lazily": batched(Lazily),
    "an epoch shorter than the queue": batched(lambda dataset: SubsetRandomSampler([7, 1, 4]), size=2),
    "its own iterator": OwnIterator,
    "one batch": batched(SequentialSampler, size=100),
    "fixed": lambda dataset: [[3, 1], [0, 2, 9], [5]],
}
Between = Callable[[Any, int], Any]
"""Called with the loader and the number of each epoch before it begins."""


def epochs(
    sampling: Sampling | None,
    arguments: LoaderArguments,
    *,
    between: Between = lambda loader, epoch: None,
    in_step: Callable[[], Any] = lambda: None,
    stop_at: int | None = None,
) -> tuple[Any, list[list[list[int]]], Any]:
    """The loader, batches of three epochs, and a number that torch's generator gives afterwards."""
    seed_generators(11)
    workload = Shuffled() if sampling is None else Sampled(sampling)
    loader = build_loader(workload, Numbers(), arguments)
    seen = []
    for epoch in range(NUM_EPOCHS):
        between(loader, epoch)
        seen.append([])
        for number, batch in enumerate(loader):
            seen[-1].append(batch.tolist())
            in_step()
            if epoch == 0 and number == stop_at:
                break
    return loader, seen, (torch.rand(()).item(), np.random.random(), random.random())


def interrupted() -> Any:
    raise KeyboardInterrupt


class TestSamples:
    @pytest.mark.parametrize("sampling", [None, *SAMPLINGS.values()], ids=["default", *SAMPLINGS])
    def test_are_those_without_it_over_three_epochs_and_so_are_the_generators(self, sampling: Sampling | None) -> None:
        _, plain, drawn = epochs(sampling, WORKERS)
        loader, seen, ours = epochs(sampling, AHEAD)
        assert (seen, ours) == (plain, drawn)
        guessed_wrong = sampling is SAMPLINGS["split over ranks"]  # a loop that sets no epoch repeats the first
        assert loader.num_restarts == 1 + guessed_wrong, "only the first epoch began with idle workers"

    @pytest.mark.parametrize("stop_at", [0, 2, 5])
    @pytest.mark.parametrize("sampling", ["shuffled", "own generator", "in place", "split over ranks"])
    def test_are_those_without_it_after_an_epoch_that_was_left(self, sampling: str, stop_at: int) -> None:
        """The last batch of 22 samples by four is number 5."""
        _, plain, drawn = epochs(SAMPLINGS[sampling], WORKERS, stop_at=stop_at)
        _, seen, ours = epochs(SAMPLINGS[sampling], AHEAD, stop_at=stop_at)
        assert (seen, ours) == (plain, drawn)

    @pytest.mark.parametrize(
        ("numbers", "num_restarts"),
        [((0, 1, 2), 1), ((4, 5, 6), 1), ((0, 2, 4), 2), ((0, 7, 3), 3), ((1, 1, 1), 2)],
        ids=["next", "from four on", "every second", "any", "the same"],
    )
    def test_are_those_of_the_epoch_that_the_loop_sets(self, numbers: tuple[int, ...], num_restarts: int) -> None:
        """A wrong guess costs a restart; the step between two epochs is what the next guess takes."""

        def between(loader: Any, epoch: int) -> None:
            loader.batch_sampler.sampler.set_epoch(numbers[epoch])

        with pytest.warns(UserWarning, match="begin epochs early") if num_restarts > GIVEN_UP_AFTER else nullcontext():
            loader, seen, _ = epochs(SAMPLINGS["split over ranks"], AHEAD, between=between)
        assert seen == epochs(SAMPLINGS["split over ranks"], WORKERS, between=between)[1]
        assert loader.num_restarts == num_restarts

    @pytest.mark.parametrize("is_set", [True, False], ids=["the loop sets it too", "by itself"])
    def test_are_those_of_a_sampler_that_counts_on_by_itself(self, *, is_set: bool) -> None:
        def sampling(dataset: Any) -> BatchSampler:
            return BatchSampler(Counting(dataset), 4, drop_last=False)

        def between(loader: Any, epoch: int) -> None:
            if is_set:
                loader.batch_sampler.sampler.set_epoch(epoch)

        loader, seen, _ = epochs(sampling, AHEAD, between=between)
        assert seen == epochs(sampling, WORKERS, between=between)[1]
        assert loader.num_restarts == 1

    def test_are_those_without_it_where_the_model_draws_too_which_is_said(self) -> None:
        _, plain, drawn = epochs(None, WORKERS, in_step=lambda: torch.rand(3))
        with pytest.warns(UserWarning, match="give the sampler its own generator"):
            loader, seen, ours = epochs(None, AHEAD, in_step=lambda: torch.rand(3))
        assert (seen, ours) == (plain, drawn)
        assert loader.num_restarts == NUM_EPOCHS

    def test_a_model_that_draws_disturbs_no_sampler_with_a_generator_of_its_own(self) -> None:
        _, plain, drawn = epochs(SAMPLINGS["own generator"], WORKERS, in_step=lambda: torch.rand(3))
        loader, seen, ours = epochs(SAMPLINGS["own generator"], AHEAD, in_step=lambda: torch.rand(3))
        assert (seen, ours, loader.num_restarts) == (plain, drawn, 1)

    def test_a_sampler_that_cannot_be_copied_has_no_epochs_ahead_which_is_said(self) -> None:
        class Held(SequentialSampler):
            def __deepcopy__(self, memo: Any) -> Any:
                raise TypeError("it holds a file")

        with pytest.warns(UserWarning, match="cannot be copied \\(it holds a file\\)"):
            loader, seen, _ = epochs(batched(Held), AHEAD)
        assert seen == epochs(SAMPLINGS["sequential"], WORKERS)[1]
        assert loader.num_restarts == NUM_EPOCHS

    def test_indices_that_cannot_be_compared_count_as_others(self) -> None:
        _, plain, drawn = epochs(Pairs, WORKERS)
        with pytest.warns(UserWarning, match="no longer begin epochs early"):
            loader, seen, ours = epochs(Pairs, AHEAD)
        assert (seen, ours, loader.num_restarts) == (plain, drawn, NUM_EPOCHS)

    def test_a_wait_that_is_interrupted_loses_no_batch(self, monkeypatch: Any) -> None:
        order = [[0, 1], [2], [3]]
        one = LoaderArguments(num_workers=1, prefetch_factor=2, persistent_workers=True, epochs_ahead=True)
        iterator = iter(build_loader(Shuffled(), Numbers(), one, batch_sampler=order))  # of two, the other may be first
        assert next(iterator).tolist() == [0, 1]
        with monkeypatch.context() as patch:
            patch.setattr(iterator._iterator, "_get_data", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        assert [batch.tolist() for batch in iterator] == [[2], [3]]

    def test_after_a_broken_sample_the_next_epoch_is_whole(self) -> None:
        order = [[0, 1], [-1], [2, 3], [4]]
        loader = build_loader(Shuffled(), Numbers(), AHEAD, batch_sampler=order)
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        with pytest.raises(ValueError, match="a broken sample"):
            next(iterator)
        assert [batch.tolist() for batch in iterator] == [[2, 3], [4]]
        assert next(iter(loader)).tolist() == [0, 1]


class TestAhead:
    def test_workers_are_asked_for_the_next_epoch_before_the_last_batch_of_one_is_given_out(self) -> None:
        """Two epochs of six batches: as many are outstanding at the end as in the middle."""
        loader = build_loader(Sampled(SAMPLINGS["own generator"]), Numbers(), AHEAD)
        outstanding = []
        for _ in range(2):
            iterator = iter(loader)
            for _ in range(len(loader)):
                next(iterator)
                outstanding.append(outstanding_batches(iterator))
        assert outstanding == [AHEAD.capacity] * 12
        iterator = iter(build_loader(Sampled(SAMPLINGS["own generator"]), Numbers(), WORKERS))
        assert [outstanding_batches(iterator) for _ in iterator] == [4, 4, 3, 2, 1, 0]

    def test_workers_are_the_same_processes_in_every_epoch(self) -> None:
        loader = build_loader(Shuffled(), Numbers(), AHEAD)
        pids = []
        for _ in range(NUM_EPOCHS):
            iterator = iter(loader)
            pids.append([worker.pid for worker in iterator._workers])
            assert len(list(iterator)) == len(loader) == 6
        assert pids[0] == pids[1] == pids[2]

    def test_an_order_without_an_end_can_be_moved(self) -> None:
        order = EndlessBatches([[index] for index in range(10)])
        iterator = iter(build_loader(Shuffled(), Numbers(), AHEAD, batch_sampler=order))
        next(iterator)
        order.seek(7)
        assert outstanding_batches(iterator) == AHEAD.capacity
        assert [next(iterator).item() for _ in range(6)] == [1, 2, 3, 4, 7, 8]

    def test_a_measured_restart_is_one_with_busy_workers(self) -> None:
        """Idle workers are found by two of five epochs: the first, and the one after an epoch left early."""
        made = []

        def make_loader(batches: Any) -> Any:
            made.append(build_loader(Shuffled(), Numbers(), AHEAD, batch_sampler=batches))
            return made[-1]

        measure.epoch_restart_ns(make_loader, [[0, 1], [2, 3], [4, 5]], 0.0)
        assert [loader.num_restarts for loader in made] == [2]

    def test_a_measured_epoch_takes_the_time_of_its_steps_before_its_end(self, monkeypatch: Any) -> None:
        """Else workers would have had no time to begin the next; long steps count up to a limit. Loaders whose workers
        begin none are not waited for.
        """

        class Ahead(list):
            epochs_ahead = True

        slept: list[float] = []
        monkeypatch.setattr(measure.time, "sleep", slept.append)
        for make_loader, step_time_ns in ((Ahead, 20_000_000), (Ahead, 10**10), (list, 10**10)):
            measure.epoch_restart_ns(make_loader, [[0], [1], [2]], 0.0, step_time_ns)
        assert slept == [0.06] * 2 + [measure.MAX_COMPUTING_S] * 2 + [0.0] * 2

    @pytest.mark.parametrize("arguments", [WORKERS, AHEAD], ids=["PyTorch's", "ahead"])
    def test_an_iterator_of_an_earlier_epoch_goes_on_with_the_last_one(self, arguments: LoaderArguments) -> None:
        loader = build_loader(Shuffled(), Numbers(), arguments, batch_sampler=[[index] for index in range(4)])
        first = iter(loader)
        next(first)
        assert [(one.item(), other.item()) for one, other in zip(first, iter(loader), strict=True)] == [(0, 1), (2, 3)]
        assert list(first) == []

    @pytest.mark.parametrize(
        "arguments",
        [
            LoaderArguments(epochs_ahead=True),
            LoaderArguments(num_workers=1, epochs_ahead=True),
            LoaderArguments(num_workers=1, persistent_workers=True),
        ],
    )
    def test_needs_workers_that_are_kept_and_to_be_asked_for(self, arguments: LoaderArguments) -> None:
        assert not isinstance(build_loader(Shuffled(), Numbers(), arguments), EpochsAhead)


SHORT = sample_facts(steps_per_epoch=SHORT_EPOCH_STEPS)
LOADING = DataLoading()
CHOICE = {**LOADING.defaults, "num_workers": 2, "persistent_workers": True, "epochs_ahead": True}


class TestStrategy:
    def test_is_tried_where_epochs_are_short(self) -> None:
        long = replace(SHORT, steps_per_epoch=SHORT_EPOCH_STEPS + 1)
        tried = [
            any(choice["epochs_ahead"] for choice in LOADING.choices(sample_environment(), facts))
            for facts in (SHORT, long, replace(SHORT, steps_per_epoch=None))
        ]
        assert tried == [True, False, False]

    @pytest.mark.parametrize(
        ("device_kind", "facts", "reason"),
        [
            ("cuda", SHORT, None),
            ("cuda", replace(SHORT, randomness="switchable"), None),
            ("cpu", replace(SHORT, randomness="none"), None),
            ("cpu", replace(SHORT, randomness="switchable"), "share a random generator"),
            ("cpu", replace(SHORT, randomness="always"), "share a random generator"),
            (
                "cuda",
                replace(SHORT, dataset=replace(SHORT.dataset, kind="iterable")),
                "iterable dataset's epoch is not known",
            ),
        ],
    )
    def test_is_refused_where_the_next_order_is_not_known(
        self, device_kind: str, facts: Any, reason: str | None
    ) -> None:
        support = LOADING.supports({**CHOICE, "num_workers": 1}, sample_environment(device_kind), facts)
        assert isinstance(support, Supported) if reason is None else reason in support.reason

    @pytest.mark.parametrize("without", [{"num_workers": 0}, {"persistent_workers": False}])
    def test_is_dropped_without_workers_that_are_kept(self, without: dict[str, Any]) -> None:
        candidate = Candidate(choices={"data_loading": {**CHOICE, **without}})
        assert not normalise(candidate, sample_facts(current={})).choices.get("data_loading", {}).get("epochs_ahead")

    def test_is_seen_to_have_taken_effect(self) -> None:
        plan = Plan()
        LOADING.contribute(plan, CHOICE)
        evidence = LOADING.evidence(assemble(Line(), plan, device=torch.device("cpu")))
        assert LOADING.took_effect(evidence, CHOICE).took
        assert not LOADING.took_effect({**evidence, "epochs_ahead": False}, CHOICE).took
