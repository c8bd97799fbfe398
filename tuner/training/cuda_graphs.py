"""Recorder of work as CUDA graphs on a separate stream; if recording fails, it names the reason."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from steptune.tuner.training.capture_failure import FailingOperator, explained, waits

if TYPE_CHECKING:
    import torch

    from steptune.tuner.training.recorder import Recorded


class CudaGraphs:
    """Recorder of CUDA graphs on one device.

    Work is warmed up on the stream that it is recorded on: what autograd keeps for a parameter remembers the stream of
    its first use.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], object], count: int) -> None:
        """Run the function `count` times; in the last run, waiting for the device is an error."""
        import torch

        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(count - 1):
                run()
            self._run_without_waiting(run)
        current.wait_stream(self._stream)

    def record(self, runs: Sequence[Callable[[], object]]) -> list[Recorded]:
        import torch

        torch.cuda.synchronize(self._device)
        pool = torch.cuda.graph_pool_handle()
        with _without_collection():
            return [self._record(run, pool) for run in runs]

    def finish(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def _record(self, run: Callable[[], object], pool: Any) -> Recorded:
        import torch

        graph = torch.cuda.CUDAGraph()
        raised: list[Exception] = []
        outputs: object = None
        try:
            # Of this thread only: that of a loader which pins memory may allocate meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    outputs = run()
                except Exception as error:
                    raised.append(error)  # ending the recording raises another one, which says less
                    raise
        except Exception as error:
            cause = raised[0] if raised else error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise explained(cause) from cause
        return _Graph(graph, outputs)

    def _run_without_waiting(self, run: Callable[[], object]) -> None:
        try:
            with _waiting_is_an_error():
                run()
        except RuntimeError as error:
            if not waits(error):
                raise
            raise explained(error, self._operator_of(run)) from error

    def _operator_of(self, run: Callable[[], object]) -> str:
        """Run the step once more and return the operator that waits for the device; empty if none waits this time."""
        operator = FailingOperator()
        try:
            with _waiting_is_an_error(), operator.mode():
                run()
        except RuntimeError as error:
            return operator.name if waits(error) else ""
        return ""


class _Graph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: object) -> None:
        self._graph = graph
        self.outputs: Any = outputs

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    import torch

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype, which finds most but not all
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Suspend garbage collection, which might call CUDA in the middle of a recording."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
