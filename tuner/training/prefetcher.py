"""Loader that is one batch ahead: the next batch is copied to the device while the current one is computed.

The copy runs on a stream of its own. Computation waits for the copy by an event, and the caching allocator is
told that both streams use the batch (`record_stream`), so that its memory is not reused while either still uses it.
A copy is asynchronous only from page-locked memory.

Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html ,
https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from steptune.tuner.training.structure import moved
from steptune.tuner.workloads.workload import leaves

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.plan import LoaderArguments
    from steptune.tuner.workloads.workload import Workload


class CopyStream(Protocol):
    """Stream on which batches are copied."""

    def copying(self) -> AbstractContextManager[Any]:
        """Run the copies launched inside the context concurrently with the computation."""

    def hand_over(self, batch: Any) -> None:
        """Make later computation wait for the copy, and keep the batch's memory until it is used."""


class SameStream:
    """Substitute for a copy stream on a device without streams: copies run in order with the computation."""

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def hand_over(self, batch: Any) -> None:
        pass


class SideStream:
    """CUDA stream on which copies run concurrently with the current stream."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copying(self) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.stream(self._stream)

    def hand_over(self, batch: Any) -> None:
        import torch

        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for leaf in leaves(batch):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(current)


def copy_stream(device: torch.device) -> CopyStream:
    return SideStream(device) if device.type == "cuda" else SameStream()


class PrefetchingLoader:
    """Loader that gives another loader's batches in the same order, already on the device.

    Its other attributes are those of the wrapped loader.

    Args:
        loader: Any iterable.
        move: Function that takes a batch from the loader, launches its copy, and returns the batch on the device.
    """

    def __init__(self, loader: Any, move: Callable[[Any], Any], stream: CopyStream) -> None:
        self.loader = loader
        self._move = move
        self._stream = stream

    def __iter__(self) -> PrefetchingIterator:
        return PrefetchingIterator(iter(self.loader), self._move, self._stream)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)


class PrefetchingIterator:
    """Iterator over one pass of a loader, one batch ahead. It offers all other attributes of the loader's iterator.

    Attributes:
        host: The batch given out last, as the loader made it, to count its samples without waiting for the device.
        num_ahead: Batches taken from the loader and not yet given out: 1, but 0 before the first and at the end.
    """

    def __init__(self, iterator: Iterator[Any], move: Callable[[Any], Any], stream: CopyStream) -> None:
        self._iterator = iterator
        self._move = move
        self._stream = stream
        self._began = False
        self._ahead: tuple[Any, Any] | None = None
        self._ended: BaseException | None = None
        self.host: Any = None

    @property
    def num_ahead(self) -> int:
        return int(self._ahead is not None)

    def __iter__(self) -> PrefetchingIterator:
        return self

    def __next__(self) -> Any:
        """Return the next batch. An error of the loader is raised after the batches that came before it.

        Raises:
            StopIteration: The loader has ended.
        """
        if not self._began:
            self._began = True
            self._fetch()
        if self._ahead is None:
            assert self._ended is not None
            raise self._ended
        self.host, batch = self._ahead
        self._ahead = None
        self._stream.hand_over(batch)
        self._fetch()
        return batch

    def _fetch(self) -> None:
        """Fetch the next batch and launch its copy, unless the loader has ended."""
        if self._ended is not None:
            return
        try:
            host = next(self._iterator)
            with self._stream.copying():
                self._ahead = host, self._move(host)
        except Exception as error:  # raised in its turn, by `__next__`
            self._ended = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


def as_loaded(iterator: Any, batch: Any) -> Any:
    """Return the batch that an iterator has just yielded, but as the loader made it, before its move to the device."""
    return iterator.host if isinstance(iterator, PrefetchingIterator) else batch


def batch_mover(workload: Workload, arguments: LoaderArguments, device: torch.device) -> Callable[[Any], Any]:
    """Return a function that moves a batch from the loader to the device, and converts it from bytes if necessary."""

    def move(batch: Any) -> Any:
        batch = moved(batch, device, non_blocking=True)
        return workload.from_bytes(batch) if arguments.as_bytes else batch

    return move
