"""Several ranks on this machine, of gloo or of NCCL, kept for all tests of a module: starting one costs seconds.

What they run is a function at the top of a module, given its rank's number first.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

MAX_RANKS = 4
ANSWER_S = 600.0
SOON_S = 2.0


class RankFailed(Exception):
    """Ranks raised; their tracebacks are the message."""


class Ranks:
    """Processes that join a new group for every call.

    Args:
        device: "cpu", or "cuda": each rank has the device of its number, or a part of one.
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

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, networks: Sequence[Path] = ()) -> list[Any]:
        """Run the function on ranks; return its results by rank.

        Args:
            networks: Of emulated hosts, on which the ranks are then.

        Raises:
            RankFailed: On any of them.
        """
        self._num_calls += 1
        store = str(Path(self._directory.name) / f"rendezvous{self._num_calls}")
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            _send(pipe, (function, args, rank, num_ranks, store, tuple(networks)))
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
                    failure, answers[waiting[pipe]] = _receive(pipe)
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


def _send(pipe: Any, message: Any) -> None:
    """With tensors by value: PyTorch's own way through a pipe keeps a descriptor open for each of them."""
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe: Any) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _serve(pipe: Any, device: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            *job, networks = _receive(pipe)
        except EOFError:
            return
        if networks:  # a thread enters a network for itself and those that it starts; this one stays where it is
            thread = threading.Thread(target=_run_on_host, args=(pipe, device, networks, *job))
            thread.start()
            thread.join()
        else:
            _run(pipe, device, *job)


def _run(
    pipe: Any, device: str, function: Callable[..., Any], args: tuple, rank: int, num_ranks: int, store: str
) -> None:
    try:
        with group(rank, num_ranks, store, device):
            answer = function(rank, *args)
        _send(pipe, ("", answer))
    except BaseException:
        _send(pipe, (traceback.format_exc(), None))


def _run_on_host(
    pipe: Any, device: str, networks: tuple[Path, ...], function: Any, args: Any, rank: int, *job: Any
) -> None:
    from steptune.tuner.emulation import NETWORKS_VARIABLE
    from steptune.tuner.trials.host_networks import enter_host_network

    before = dict(os.environ)
    os.environ[NETWORKS_VARIABLE] = ",".join(map(str, networks))
    try:
        enter_host_network(rank, job[0])
        _run(pipe, device, function, args, rank, *job)
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def group(rank: int, num_ranks: int, store: str, device: str = "cpu") -> Iterator[None]:
    """A process group of gloo, and of NCCL for a device, and the process as a fresh rank has it."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from steptune.tuner.trials.rank_device import rank_device

    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    rank_device(device, rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=300),
    )
    dist.all_reduce(torch.zeros(1))  # a rank that is done at once would hang up on one that is still connecting
    try:
        yield
    finally:
        # The last reference to a group must not be that of a job in a cycle: its destructor would wait for gloo's
        # thread while it holds the interpreter's lock, which that thread needs to free its last tensors.
        gc.collect()
        dist.destroy_process_group()
