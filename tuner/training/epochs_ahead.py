"""Loader whose workers start to load the next epoch while the model still trains on the last batches of the current
one.

PyTorch hands no index of an epoch to its workers before the epoch begins, so that they are idle at every end of one and
the model waits for the first batches of the next. Here the workers never see an end. Once the indices of an epoch are
handed out, a copy of the sampler draws those of the next, with separate generator states: the sampler itself and the
process's generators stay as they are. When the loop begins that epoch, the sampler draws as it would without this, and
what was handed out ahead counts only where it is the same. Else it is thrown away and the epoch begins as PyTorch
begins it. So samples and their order are those of the loader in every case: a guess that fails costs time, nothing
else.

It fails where the sampler shuffles by a generator that something else draws from before the epoch begins, dropout on a
CPU for one, or where the loop sets another epoch than the next.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.generators import generator_states, set_generators

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

GIVEN_UP_AFTER = 2
"""Number of consecutive wrong guesses of the next epoch's order after which no more guesses are made."""


class EpochsAhead:
    """Loader that gives another loader's batches in the same order, and loads the next epoch's batches ahead.

    Its other attributes are those of the wrapped loader.

    Args:
        loader: Loader with persistent workers over a map-style dataset; it is never iterated itself.
        options: Arguments of that loader other than dataset and sampling.

    Attributes:
        epochs_ahead: True; distinguishes it from other loaders.
        num_restarts: Epochs that began with idle workers, the first among them.
        workers: Iterator whose workers load all epochs; None before the first.
    """

    epochs_ahead = True

    def __init__(self, loader: DataLoader[Any], options: dict[str, Any]) -> None:
        from torch.utils.data import DataLoader

        self.loader = loader
        self.num_restarts = 0
        self._feed = _Feed(loader.batch_sampler, loader.dataset)
        self._endless: DataLoader[Any] = DataLoader(loader.dataset, batch_sampler=self._feed, **options)
        self.workers: Any = None

    def __iter__(self) -> EpochIterator:
        """Begin an epoch, whether or not the previous one was finished."""
        if not self._feed.begin():
            self.num_restarts += 1
            self.workers = iter(self._endless)
        return EpochIterator(self.workers, self._feed)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)


@dataclass(eq=False)
class _Epoch:
    """Epoch of which some or all batches were requested from workers.

    Attributes:
        guessed: Batches that were drawn by a guess.
        asked: Number of batches that workers were asked for.
        given: Number of batches that the training loop has received.
        disturbed: Loading failed, or was interrupted: the next epoch begins anew.
    """

    source: Iterator[Any]
    guessed: list[Any] = field(default_factory=list)
    asked: int = 0
    given: int = 0
    complete: bool = False
    disturbed: bool = False

    @property
    def finished(self) -> bool:
        return self.complete and self.given == self.asked


class EpochIterator:
    """Iterator over the current epoch of a loader whose own iterator never ends. It has the attributes of the loader's
    iterator.

    As with PyTorch's kept workers, all iterators of a loader go on with the epoch that was begun last.
    """

    def __init__(self, iterator: Any, feed: _Feed) -> None:
        self._iterator = iterator
        self._feed = feed

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: The epoch has ended.
        """
        epoch = self._feed.current
        if epoch.finished:
            raise StopIteration
        received = self._iterator._rcvd_idx
        try:
            batch = next(self._iterator)
        except BaseException:  # where the wait was interrupted, the batch is still to come
            epoch.given += self._iterator._rcvd_idx - received
            epoch.disturbed = True
            raise
        epoch.given += 1
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class _Feed:
    """Feed of batch indices for the workers, one epoch after another; the order of later epochs is guessed.

    Args:
        sampler: The loader's batch sampler.
        dataset: Dataset, which is not copied with the sampler.
    """

    def __init__(self, sampler: Any, dataset: Any) -> None:
        self._sampler = sampler
        self._dataset = dataset
        self._epochs: deque[_Epoch] = deque()
        self._begun: Iterator[Any] | None = None
        self._twin: Any = None
        self._apart: Any = None
        self._number: int | None = None
        self._step = 1
        self._failed = 0

    @property
    def current(self) -> _Epoch:
        return self._epochs[0]

    def __iter__(self) -> Iterator[Any]:
        """Restart the feed; the loader calls this when earlier requests are no longer valid."""
        source, self._begun = self._begun or _rest(iter(self._sampler)), None
        self._epochs = deque([_Epoch(source)])
        return _Asking(self)

    def begin(self) -> bool:
        """Begin the training loop's next epoch; return whether the workers have already begun this epoch."""
        self._note_number()
        if len(self._epochs) < 2 or not self.current.finished or self.current.disturbed:
            return False
        self._epochs.popleft()
        epoch = self.current
        source = _rest(iter(self._sampler))
        drawn = list(islice(source, epoch.asked + epoch.complete))
        if _same(drawn, epoch.guessed):
            epoch.source, epoch.guessed, self._failed = source, [], 0
            return True
        self._begun = chain(drawn, source)
        self._note_failure()
        return False

    def _note_number(self) -> None:
        before, self._number = self._number, _number_of(self._sampler)
        if before is not None and self._number is not None:
            self._step = self._number - before

    def _note_failure(self) -> None:
        self._failed += 1
        if self._failed == GIVEN_UP_AFTER:
            warnings.warn(
                "workers no longer begin epochs early, because the order of an epoch was not known before it "
                "began: other code draws from the sampler's random generator, so give the sampler its own "
                "generator",
                stacklevel=4,
            )

    def ask(self) -> Any:
        """Return the batch that a worker is asked for next.

        Raises:
            StopIteration: No further batch is known: the next epoch cannot be guessed, or is empty.
        """
        while True:
            epoch = self._epochs[-1]
            if not epoch.complete:
                guess = len(self._epochs) > 1
                batches = self._guessed(epoch) if guess else list(islice(epoch.source, 1))
                if batches:
                    epoch.asked += 1
                    return batches[0]
                epoch.complete = True
            if not epoch.asked or not self._guess():
                raise StopIteration

    def _guess(self) -> bool:
        """Begin the epoch after the last requested one, if the sampler can be copied; return whether that epoch was
        begun.
        """
        if self._failed >= GIVEN_UP_AFTER:
            return False
        if len(self._epochs) == 1:
            try:
                self._twin = copy.deepcopy(self._sampler, {id(self._dataset): self._dataset})
            except Exception as error:  # a sampler may hold anything
                self._failed = GIVEN_UP_AFTER
                warnings.warn(
                    f"workers do not begin epochs early, because the sampler cannot be copied ({error})", stacklevel=2
                )
                return False
            self._apart = generator_states()
        with self._generators_apart():
            if self._number is not None:  # as the epoch began: a sampler may count on by itself when one has ended
                _set_epoch(self._twin, self._number + self._step * len(self._epochs))
            self._epochs.append(_Epoch(_rest(iter(self._twin))))
        return True

    def _guessed(self, epoch: _Epoch) -> list[Any]:
        try:
            with self._generators_apart():
                batches = list(islice(epoch.source, 1))
        except Exception:  # the sampler itself raises it in its turn
            return []
        epoch.guessed += batches
        return batches

    @contextmanager
    def _generators_apart(self) -> Iterator[None]:
        """Run the context with the random generators in the state in which the last guess left them; then restore the
        process's own state.
        """
        ours = generator_states()
        set_generators(self._apart)
        try:
            yield
        finally:
            self._apart = generator_states()
            set_generators(ours)


class _Asking:
    """Iterator over a feed. After a `StopIteration` it can continue as soon as further batches are known."""

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed

    def __iter__(self) -> _Asking:
        return self

    def __next__(self) -> Any:
        return self._feed.ask()


def _rest(source: Iterator[Any]) -> Iterator[Any]:
    """Yield the rest of a pass by `next` alone. `islice` and `chain` would call `iter`, and so restart a sampler that
    is its own iterator.
    """
    while True:
        try:
            batch = next(source)
        except StopIteration:
            return
        yield batch


def _same(drawn: list[Any], guessed: list[Any]) -> bool:
    try:
        return [list(batch) for batch in drawn] == [list(batch) for batch in guessed]
    except (RuntimeError, TypeError, ValueError):  # indices that are tensors or arrays of several numbers
        return False


def _counting(sampler: Any) -> list[Any]:
    """Return the batch sampler and its inner sampler, each only if it has an epoch number."""
    return [
        one
        for one in (sampler, getattr(sampler, "sampler", None))
        if hasattr(one, "set_epoch") and isinstance(getattr(one, "epoch", None), int)
    ]


def _number_of(sampler: Any) -> int | None:
    return next((one.epoch for one in _counting(sampler)), None)


def _set_epoch(sampler: Any, epoch: int) -> None:
    for one in _counting(sampler):
        one.set_epoch(epoch)
