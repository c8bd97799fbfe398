"""Several ranks on this machine, of gloo or of NCCL, kept for all tests of a module: starting one costs seconds.

What they run is a function at the top of a module, given its rank's number first.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

MAX_RANKS = 4
ANSWER_S = 120.0
SOON_S = 2.0


class RankFailed(Exception):
    """Ranks raised; their tracebacks are the message."""


class Ranks:
    """Processes that join a new group for every call.

    Args:
        device: "cpu", or "cuda": each rank has the device of its number.
        variables: Of the environment of each, by its number, before it uses a device: NCCL reads some once.
    """

    def __init__(
        self,
        device: str = "cpu",
        num_ranks: int = MAX_RANKS,
        variables: Callable[[int], dict[str, str]] = lambda rank: {},
    ) -> None:
        self._device = device
        self._variables = variables
        self._num_processes = num_ranks
        self._directory = tempfile.TemporaryDirectory()
        self._num_calls = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(self._num_processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, self._device, self._variables(rank))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returned, by rank.

        Raises:
            RankFailed: On any of them.
        """
        self._num_calls += 1
        store = str(Path(self._directory.name) / f"rendezvous{self._num_calls}")
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            pipe.send((function, args, rank, num_ranks, store))
        answers, failures = [None] * num_ranks, []
        waiting = dict(zip(self._pipes[:num_ranks], range(num_ranks), strict=True))
        while waiting:
            # What one rank raised makes others fail that wait for it: all of them tell, if they do so soon.
            ready = multiprocessing.connection.wait(list(waiting), timeout=SOON_S if failures else ANSWER_S)
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())} say nothing")
                break
            for pipe in ready:
                try:
                    failure, answers[waiting[pipe]] = pipe.recv()
                except EOFError:
                    failure = "died without a word"
                if failure:
                    failures.append(f"rank {waiting[pipe]}: {failure}")
                del waiting[pipe]
        if failures:
            self._end()
            self._start()
            raise RankFailed("\n".join(failures))
        return answers

    def close(self) -> None:
        self._end()
        self._directory.cleanup()


def _serve(pipe: Any, device: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, num_ranks, store = pipe.recv()
        except EOFError:
            return
        try:
            with group(rank, num_ranks, store, device):
                answer = function(rank, *args)
            pipe.send(("", answer))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


@contextmanager
def group(rank: int, num_ranks: int, store: str, device: str = "cpu") -> Iterator[None]:
    """A process group of gloo, and of NCCL for a device, and the process as a fresh rank has it."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
