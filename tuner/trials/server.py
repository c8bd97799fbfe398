"""Trial server: one warm process per study from which the ranks of every trial are forked.

It preloads torch, what ranks run and what the workload's file imports, but runs no operator and touches no device, so
a forked rank is at its first operator in milliseconds. It is single-threaded. It adopts orphans and
leaves no process behind: when a job ends, when it is told to, and when its parent dies.

Run as `python -m steptune.tuner.trials.server DESCRIPTOR PARENT_PID [--preload MODULE ...]`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from steptune.tuner.hardware import CORES_VARIABLE, allowed_cores
from steptune.tuner.trials.imports import load_imports
from steptune.tuner.trials.messages import (
    Channel,
    Exit,
    JobEnded,
    Kill,
    MessageTooLargeError,
    Preload,
    RankExited,
    RankMessage,
    ServerReady,
    Start,
    Tell,
    ToServer,
    decoder_of,
)
from steptune.tuner.trials.processes import (
    become_subreaper,
    die_with_parent,
    kill_all_others,
    kill_descendants,
    kill_session,
    kill_tree,
    oom_kills,
    others_stopped,
    prefer_for_oom_kill,
    redirect_output,
)
from steptune.tuner.trials.scratch import empty_temporary, note_forks, remove

TORCH_MODULES = ("torch", "torch._dynamo", "torch.utils.data", "torch.profiler", "torch.utils.flop_counter")
RANK_MODULES = tuple(f"steptune.tuner.trials.{name}" for name in ("inspection", "reference", "trial"))
"""Modules that every rank imports. They in turn import the strategies, including any that other packages provide."""
COMPILER_MODULES = ("torch._inductor.compile_fx",)
"""Modules that the server imports while the first job runs, if Triton is installed, because a rank that compiles would
take seconds to import them. Without Triton, the import takes less than a second.
"""
KERNEL_MODULES = ("steptune.kernels.applying",)
"""Modules that the server imports while the first job runs, if Triton is not installed. Where Triton is installed, they
would import Triton too, so each rank imports them itself.
"""
FAILED_RANK_GRACE_S = 2.0


@dataclass
class _Rank:
    pid: int
    channel: Channel
    killed: bool = False
    exited: bool = False
    violation: str = ""


@dataclass
class _Job:
    first_rank: int = 0
    ranks: list[_Rank] = field(default_factory=list)
    first_exit_s: float | None = None

    @property
    def alive(self) -> list[_Rank]:
        return [rank for rank in self.ranks if not rank.exited]


class TrialServer:
    """Main loop of the server, which handles messages from the parent, messages from ranks, and exits of ranks.

    Args:
        alone: Whether every process that this one may send a signal to belongs to its study.
        own_pids: Whether the server has a separate process namespace, shared memory and temporary directory.
    """

    def __init__(
        self, parent: Channel, start_method: str = "fork", *, alone: bool = False, own_pids: bool = False
    ) -> None:
        self._parent = parent
        self._alone = alone
        self._own_pids = own_pids
        self._start_method = start_method
        self._jobs: dict[str, _Job] = {}
        self._selector = selectors.DefaultSelector()
        self._decoder = decoder_of(ToServer)
        self._oom_kills = oom_kills()
        self._running = True
        self._child_died = False
        self._imports_compiler = start_method == "fork"

    def run(self) -> None:
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._parent, selectors.EVENT_READ)
        self._selector.register(wake_read, selectors.EVENT_READ)
        try:
            while self._running:
                timeout = 0.1 if any(job.first_exit_s for job in self._jobs.values()) else None
                for key, _ in self._selector.select(timeout):
                    self._handle(key.fileobj, wake_read)
                if self._child_died or timeout is not None:
                    self._child_died = False
                    self._reap()
        finally:
            for name in list(self._jobs):
                self._kill(name)
            self._kill_the_rest()

    def _stop(self) -> None:
        self._running = False

    def _handle(self, source: Any, wake_read: int) -> None:
        if source is self._parent:
            if not self._parent.read_available():
                self._stop()
            for line in self._parent.take_messages():
                self._obey(self._decoder.decode(line))
        elif source == wake_read:
            self._child_died = True
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
        else:
            self._forward(source)

    def _obey(self, message: ToServer) -> None:
        match message:
            case Start():
                self._start(message)
            case Tell(job=name, command=command):
                job = self._jobs.get(name)
                if job is not None and not job.ranks[0].exited:
                    with contextlib.suppress(OSError):
                        job.ranks[0].channel.send(command)
            case Kill(job=name):
                self._kill(name)
            case Preload(path=path):
                if self._start_method == "fork":
                    preload(load_imports(Path(path)))
            case Exit():
                self._stop()

    # --- ranks --------------------------------------------------------------------------------

    def _start(self, message: Start) -> None:
        job = self._jobs[message.job] = _Job(first_rank=message.first_rank)
        for number in range(message.num_ranks):
            ours, theirs = socket.socketpair()
            start = self._fork if self._start_method == "fork" else self._spawn
            pid = start(message, number, ours, theirs)
            theirs.close()
            rank = _Rank(pid=pid, channel=Channel(ours))
            if self._start_method != "fork":
                rank.channel.send(message.payload)
            job.ranks.append(rank)
            self._selector.register(rank.channel, selectors.EVENT_READ, (message.job, number))
        if self._imports_compiler:
            self._imports_compiler = False
            preload(KERNEL_MODULES if importlib.util.find_spec("triton") is None else COMPILER_MODULES)

    def _fork(self, message: Start, rank: int, ours: socket.socket, theirs: socket.socket) -> int:
        server_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Native threads of preloaded libraries are idle and hold no lock that a rank takes.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            ours.close()
            self._become_rank(message, rank, theirs, server_pid)
        return pid

    def _spawn(self, message: Start, rank: int, ours: socket.socket, theirs: socket.socket) -> int:
        """Start a rank in a fresh interpreter, for platforms on which forking with torch loaded is not safe."""
        descriptor = theirs.fileno()
        number, total = message.first_rank + rank, message.total_ranks or message.num_ranks
        numbers = [str(n) for n in (descriptor, number, total, os.getpid())]
        command = [sys.executable, "-m", "steptune.tuner.trials.rank", message.entry, *numbers, message.log]
        environment = {**os.environ, **variables_of_rank(message, rank)}
        process = subprocess.Popen(command, pass_fds=(descriptor,), start_new_session=True, env=environment)
        process.returncode = 0  # reaped by this server, not by subprocess
        return process.pid

    def _become_rank(self, message: Start, rank: int, connection: socket.socket, server_pid: int) -> None:
        """Turn the forked child into a rank: start a new session, discard the server's state, and run the job. Never
        returns.
        """
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            die_with_parent(server_pid)
            self._selector.close()
            self._parent.close()
            for job in self._jobs.values():
                for other in job.ranks:
                    other.channel.close()
            redirect_output(message.log)
            os.environ.update(variables_of_rank(message, rank))
            from steptune.tuner.trials.rank import run_rank

            own, total = message.first_rank + rank, message.total_ranks or message.num_ranks
            code = run_rank(message.entry, message.payload, own, total, Channel(connection))
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _forward(self, channel: Channel) -> None:
        name, number = self._selector.get_key(channel).data
        if not self._read(self._jobs[name].ranks[number]):
            self._selector.unregister(channel)
            channel.close()
        for line in channel.take_messages():
            self._send(RankMessage(job=name, rank=self._jobs[name].first_rank + number, message=line))

    def _read(self, rank: _Rank) -> bool:
        """Read from a rank once; kill it if it announces a message that is too long."""
        try:
            return rank.channel.read_available()
        except MessageTooLargeError as error:
            rank.violation = str(error)
            kill_tree(rank.pid)
            return False

    def _send(self, message: Any) -> None:
        try:
            self._parent.send(message)
        except OSError:
            self._stop()

    # --- deaths -------------------------------------------------------------------------------

    def _reap(self) -> None:
        for name, job in list(self._jobs.items()):
            for number, rank in enumerate(job.ranks):
                if not rank.exited:
                    self._reap_rank(name, job, number, rank)
            if job.first_exit_s is not None and time.monotonic() - job.first_exit_s > FAILED_RANK_GRACE_S:
                for rank in job.alive:
                    rank.killed = True
                    kill_session(rank.pid)
            if not job.alive:
                self._end(name, job)
        self._reap_orphans()

    def _reap_rank(self, name: str, job: _Job, number: int, rank: _Rank) -> None:
        try:
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = rank.pid, 0
        if pid == 0:
            return
        while not rank.channel.closed and self._drain(name, number, rank):
            pass
        rank.exited = True
        kills = oom_kills()
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and job.first_exit_s is None:
            job.first_exit_s = time.monotonic()
        self._send(
            RankExited(
                job=name,
                rank=job.first_rank + number,
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                out_of_memory=code == -signal.SIGKILL and not rank.killed and kills > self._oom_kills,
                killed=rank.killed,
                violation=rank.violation,
            )
        )
        self._oom_kills = kills
        kill_session(rank.pid)

    def _drain(self, name: str, number: int, rank: _Rank) -> bool:
        """Forward the messages left in a dead rank's connection. A live grandchild may keep the connection open."""
        with selectors.DefaultSelector() as selector:
            selector.register(rank.channel, selectors.EVENT_READ)
            if not selector.select(0):
                return False
        more = self._read(rank)
        for line in rank.channel.take_messages():
            self._send(RankMessage(job=name, rank=self._jobs[name].first_rank + number, message=line))
        return more

    def _end(self, name: str, job: _Job) -> None:
        for rank in job.ranks:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(rank.channel)
            rank.channel.close()
        del self._jobs[name]
        if not self._jobs:
            self._kill_the_rest()
            if self._alone:
                empty_temporary(shared_memory=self._own_pids)
        self._send(JobEnded(job=name))

    def _kill_the_rest(self) -> None:
        """Kill orphaned processes that escaped into another session, as compile workers do, and became this process's
        children.
        """
        if self._own_pids or (not kill_descendants() and self._alone):
            kill_all_others()

    def _kill(self, name: str) -> None:
        job = self._jobs.get(name)
        with others_stopped(shares_user=not self._own_pids) if self._alone else contextlib.nullcontext():
            for rank in job.alive if job else []:
                rank.killed = True
                kill_tree(rank.pid)
                kill_session(rank.pid)

    def _reap_orphans(self) -> None:
        tracked = {rank.pid for job in self._jobs.values() for rank in job.ranks}
        for pid in _zombie_children() - tracked:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _zombie_children() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE}


def variables_of_rank(message: Start, number: int) -> dict[str, str]:
    """Return the environment variables of a rank in a job on several hosts, including those of torchrun; empty for a
    job on one host.
    """
    if not message.variables:
        return {}
    return {**message.variables, "RANK": str(message.first_rank + number), "LOCAL_RANK": str(number)}


def rank_modules() -> tuple[str, ...]:
    """Return the modules of Steptune that every rank needs; an empty tuple if another package provides strategies,
    because importing its strategies may initialise a device or start a thread.
    """
    return () if entry_points(group="steptune.strategies") else RANK_MODULES


def preload(modules: Sequence[str]) -> None:
    """Import modules that ranks will need. A module that is missing or fails is left for the rank to report."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # shared pages stay shared: a collection in a rank does not touch preloaded objects


def main() -> None:
    parser = argparse.ArgumentParser(prog="steptune.tuner.trials.server")
    parser.add_argument("descriptor", type=int)
    parser.add_argument("parent_pid", type=int, help="process id of the parent; 0 in a separate process namespace")
    parser.add_argument("--preload", nargs="*", default=[])
    parser.add_argument("--imports", default="", help="file with further modules, written by `imports.save_imports`")
    parser.add_argument("--log", default="")
    parser.add_argument("--scratch", default="")
    parser.add_argument(
        "--alone", action="store_true", help=("declare that signals cannot reach processes of other studies")
    )
    parser.add_argument("--start-method", choices=("fork", "spawn"), default="fork")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid, signal.SIGTERM)
    become_subreaper()
    if arguments.alone:
        prefer_for_oom_kill()
    redirect_output(arguments.log)
    if arguments.scratch:
        note_forks(Path(arguments.scratch))
    os.environ[CORES_VARIABLE] = ",".join(str(core) for core in sorted(allowed_cores()))
    began = time.monotonic_ns()
    if arguments.start_method == "fork":
        # Asked for at some module's import, whether there is CUDA must not be found out by touching it: what
        # was forked after that could not use it.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        preload([*TORCH_MODULES, *rank_modules(), *arguments.preload, *load_imports(Path(arguments.imports))])
    channel = Channel.from_descriptor(arguments.descriptor)
    channel.send(ServerReady(pid=os.getpid(), preload_ns=time.monotonic_ns() - began))
    try:
        own_pids = not arguments.parent_pid
        TrialServer(channel, arguments.start_method, alone=arguments.alone, own_pids=own_pids).run()
    finally:
        if arguments.scratch:
            remove(Path(arguments.scratch))


if __name__ == "__main__":
    main()
