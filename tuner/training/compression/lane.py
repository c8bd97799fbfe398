"""Queue of multi-step reductions that run during the backward pass, one bucket after the other.

All ranks must enter the collectives of a group in one order. Callbacks of futures do not guarantee that: those of gloo
run whenever a reduction ends. So submitted functions run in the order of submission, which is DDP's order of buckets:
on CUDA on a stream of its own, without the host waiting; elsewhere in a thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Future = torch.futures.Future[torch.Tensor]
    Task = tuple[Callable[[], Sequence[torch.Tensor]], Sequence[Future]] | None


class Lane:
    """A queue of reductions, run in the order of submission.

    Attributes:
        group: Process group of all ranks, in ring order; None is the default group. Where a thread runs the reductions,
            no other collective uses it: DDP meanwhile sums on its own group which parameters were used.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        import torch

        self.group = group
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
        else:
            threading.Thread(target=_work, args=(self._tasks,), name="reductions", daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)

    def submit(self, function: Callable[[], torch.Tensor]) -> Future:
        """Submit a function that waits for its collectives, and return the future of its result."""
        future = self.future()
        self.fulfil([future], lambda: [function()])
        return future

    def future(self) -> Future:
        """Return a future that a later submission fulfils."""
        import torch

        return torch.futures.Future(devices=None if self._stream is None else [self._device])

    def fulfil(self, futures: Sequence[Future], function: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Submit a function with several results; each result fulfils one of the futures."""
        import torch

        if self._stream is None:
            self._tasks.put((function, futures))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            for future, result in zip(futures, function(), strict=True):
                future.set_result(result)  # remembers what this stream has to do before, which its waiters await


def _work(tasks: SimpleQueue[Task]) -> None:
    import torch

    with torch.no_grad():
        while (task := tasks.get()) is not None:
            function, futures = task
            try:
                for future, result in zip(futures, function(), strict=True):
                    future.set_result(result)
            except Exception as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(error)  # type: ignore[arg-type]
            del task, function, futures  # or they would live until the next step
