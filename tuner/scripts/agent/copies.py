"""Frozen copies of a script's process: forks made where training may begin, from which trials start.

A copy has imported, read and built all that the script had until there, and waits. For each request it forks once more:
that child is a trial, which goes on with the script's own next line. Neither CUDA nor a team of threads survives a
fork, so a copy is made before either exists, and torch has one thread until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from .others_files import end_at_others_files
from .ranks import has_group

MOST_COPIES = 6
HARMLESS_THREADS = ("TMonitor",)
"""Thread classes that a frozen copy may lack without harm: the thread with which tqdm watches its progress bars."""
REQUEST, PID, REFUSED = "request", "pid", "refused"
"""File names in a copy's folder: the pipe for requests; the process id; the reason why the copy can start no trial."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Forks:
    """Forks made by Steptune, which the script's fork hooks must leave unchanged.

    Attributes:
        now: True while such a fork is made: the script's hooks stay in place in it.
    """

    now = False

    @classmethod
    def fork(cls) -> int:
        """Call `os.fork`; `now` is True during the call."""
        cls.now = True
        try:
            return os.fork()
        finally:
            cls.now = False


class Copies:
    """The frozen copies that a process leaves behind.

    Args:
        folder: Folder shared with the process that starts trials.

    Attributes:
        places: Places where copies were made, in order, and reasons why none was made elsewhere.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._threads = OneThread()
        self._over = False
        self._children: list[int] = []
        self.places: list[dict[str, Any]] = []

    def freeze(self, what: str, number: int, *, is_last: bool, against: str = "") -> dict[str, Any] | None:
        """Make a frozen copy of the process at this point of the script.

        Args:
            is_last: Whether what comes next makes further copies impossible, or useless.
            against: Reason why no trial can begin here.

        Returns:
            None in the process that goes on; in a trial that starts here, later, what was requested.
        """
        if self._over:
            return None
        reason = against or self._against()
        request = None
        at_ns = time.perf_counter_ns()
        self.places.append({"what": what, "number": number, "copy": "", "reason": reason, "at_ns": at_ns})
        if not reason:
            request = self._copied()
        if is_last or request is not None:
            self.end()
        return request

    def end(self) -> None:
        """Make no more copies, because training begins."""
        if not self._over:
            self._over = True
            self._threads.end()

    def _against(self) -> str:
        """Return the reason why this process cannot be copied now; empty if it can."""
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        unknown = [thread.name for thread in others if type(thread).__name__ not in HARMLESS_THREADS]
        if threading.current_thread() is not threading.main_thread():
            return "training begins outside the main thread"
        if unknown:
            return f"a frozen copy cannot have threads, but the script has one ({unknown[0]})"
        if has_group() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return "the ranks of a process group must start together"
        if torch.cuda.is_initialized():
            return "CUDA had begun"
        if set(own_children()) - set(self._children):
            return "the script has started a process"
        return "the maximum number of copies was reached" if len(self._children) >= MOST_COPIES else ""

    def _copied(self) -> dict[str, Any] | None:
        name = f"copy-{os.getpid()}-{len(self._children)}"
        self.places[-1]["copy"] = name
        folder = self._folder / name
        folder.mkdir()
        os.mkfifo(folder / REQUEST)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else each trial would print it again
        files, frozen_ns = open_files(), time.time_ns()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads of libraries
            child = Forks.fork()
        if child:
            self._children.append(child)
            (folder / PID).write_text(str(child), encoding="ascii")
            return None
        return _wait_for_request(folder, files, frozen_ns)


class OneThread:
    """Limit of one thread for torch. A number of threads that the script sets meanwhile takes effect when the limit
    ends.
    """

    def __init__(self) -> None:
        self._set, self._get = torch.set_num_threads, torch.get_num_threads
        self._wanted = torch.get_num_threads()
        self._set(1)
        torch.set_num_threads = self._note
        torch.get_num_threads = lambda: self._wanted

    def end(self) -> None:
        """Set the number of threads that the script asked for."""
        torch.set_num_threads, torch.get_num_threads = self._set, self._get
        self._set(self._wanted)

    def _note(self, nthreads: int) -> None:
        self._wanted = nthreads


# --- in a copy ----------------------------------------------------------------------------------


def _wait_for_request(folder: Path, files: list[tuple[int, int, int]], frozen_ns: int) -> dict[str, Any]:
    """Wait for requests and have a trial forked for each. Return the request in the trial; the copy itself never
    returns.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal; the supervisor ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _redirect(os.devnull)
    if torch.cuda._is_in_bad_fork():
        (folder / REFUSED).write_text("the script had already called CUDA's driver", encoding="utf-8")
        os._exit(0)
    for request in requests_of(folder / REQUEST):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # of the supervisor, once the script itself has ended
        _reap()
        for name in request.get("imports", ()):
            importlib.import_module(name)
        if "trial" in request and _is_trial(request, handlers, files):
            end_at_others_files(request["view"], frozen_ns)
            return request
    raise AssertionError("the request pipe must stay open for writing")


def requests_of(pipe: Path) -> Generator[dict[str, Any], None, None]:
    """Yield requests, one per line.

    The pipe stays open, for writing as well: otherwise what another thread wrote between the end of one request and
    the closing of the pipe would be lost.
    A request of a trial that was given up while the copy was busy, whose folder is gone, is left out.
    """
    with os.fdopen(os.open(pipe, os.O_RDWR), "rb") as stream:
        for request in map(json.loads, stream):
            if Path(request.get("folder", pipe)).exists():
                yield request


def _is_trial(request: dict[str, Any], handlers: dict[signal.Signals, Any], files: list[tuple[int, int, int]]) -> bool:
    """Fork a keeper process, which forks a trial. Return True in the trial, False in the copy.

    Each trial has its own keeper, so that several trials may run at the same time.
    """
    copy = os.getpid()
    if Forks.fork():
        return False
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _die_with(copy)
    keeper = os.getpid()
    child = Forks.fork()
    if child:
        _see_end(Path(request["folder"]), child)
        os._exit(0)
    _begin_trial(request, keeper, handlers, files)
    return True


def _reap() -> None:
    """Reap keeper processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _begin_trial(
    request: dict[str, Any], parent: int, handlers: dict[signal.Signals, Any], files: list[tuple[int, int, int]]
) -> None:
    _die_with(parent)
    for number, handler in handlers.items():
        if handler is not None:
            signal.signal(number, handler)
    _redirect(request["log"])
    reopen(files)


def _see_end(folder: Path, child: int) -> None:
    """Wait for a trial's end, and kill the processes that it leaves running."""
    (folder / PID).write_text(str(child), encoding="ascii")
    _, status = os.waitpid(child, 0)
    while children := own_children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
    partial = folder / ".status"
    partial.write_text(str(os.waitstatus_to_exitcode(status)), encoding="ascii")
    partial.replace(folder / "status")


def own_children() -> list[int]:
    """Return the processes that this one has started or adopted and not yet waited for."""
    return [
        int(pid)
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text(encoding="ascii").split()
    ]


def _redirect(output: str) -> None:
    """Redirect output to a file, and make the input empty."""
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    source = os.open(os.devnull, os.O_RDONLY)
    for target, end in ((source, 0), (sink, 1), (sink, 2)):
        os.dup2(target, end)
    for end in (source, sink):
        os.close(end)


def _prctl(option: int, value: int) -> None:
    library: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    library(option, value, 0, 0, 0)


# --- files --------------------------------------------------------------------------------------


def open_files() -> list[tuple[int, int, int]]:
    """Return descriptor, position and flags of each open file, except the standard streams."""
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        try:
            if descriptor > 2 and stat.S_ISREG(os.fstat(descriptor).st_mode):
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                found.append((descriptor, os.lseek(descriptor, 0, os.SEEK_CUR), flags))
        except OSError:  # that of the folder, which is closed by now
            continue
    return found


def reopen(files: list[tuple[int, int, int]]) -> None:
    """Reopen files at their positions: forks share file positions, so each would skip what another has read."""
    for descriptor, position, flags in files:
        try:
            other = os.open(f"/proc/self/fd/{descriptor}", flags & (os.O_ACCMODE | os.O_APPEND))
        except OSError:
            os.lseek(descriptor, position, os.SEEK_SET)
            continue
        os.lseek(other, position, os.SEEK_SET)
        os.dup2(other, descriptor, inheritable=os.get_inheritable(descriptor))
        os.close(other)
