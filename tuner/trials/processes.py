"""Management of processes so that none is left behind.

Every trial's processes die with what started them: ranks with the trial server, the server with its
parent, whatever the manner of death. On Linux the kernel is asked for it (PR_SET_PDEATHSIG); orphans
are adopted by the server (PR_SET_CHILD_SUBREAPER), which kills them when their trial ends. Elsewhere
closed pipes do the first half.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
LINUX = sys.platform == "linux"
TURN_ATTEMPTS, TURN_PAUSE_S = 100, 0.02
"""Maximum number of attempts to become the only process that stops all others, and the pause in seconds between two
attempts.
"""


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(parent_pid: int, with_signal: int = signal.SIGKILL) -> None:
    """Ask the kernel to send a signal to this process when the thread that started this process ends.

    Args:
        parent_pid: Process id of the parent; 0 if it is unknown, in a process namespace that the parent is not in.
            There the first process of the namespace dies with the parent, and all others with the first.
    """
    if not LINUX:
        return
    _prctl(_PR_SET_PDEATHSIG, with_signal)
    if parent_pid and os.getppid() != parent_pid:  # it died before we asked
        os.kill(os.getpid(), with_signal)


def become_subreaper() -> None:
    """Make this process the new parent of orphaned descendants."""
    if LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def session_members(session: int) -> list[int]:
    """Return the process ids of a session."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == session:
                members.append(pid)
    return members


def kill_session(session: int) -> None:
    """Kill every process of a session; repeat until none is left, so that no fork escapes."""
    for _ in range(20):
        members = [pid for pid in session_members(session) if pid != os.getpid() and not _is_zombie(pid)]
        if not members:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):  # one that is stopped forks no more
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def kill_descendants(within_s: float = 5.0) -> bool:
    """Kill all descendants of this process, in any session; return whether none is left.

    Orphans count where this process adopts them. All are stopped before one is killed: stopped processes do not fork,
    but still count towards a limit on a user's processes, so that endless forking ends. A process that hides itself in
    `/proc` is found as a child, and its own children once it is dead.
    """
    end_s = time.monotonic() + within_s
    stopped: set[int] = set()
    while time.monotonic() < end_s:
        found = {child.pid for child in psutil.Process().children(recursive=True) if not _is_zombie(child.pid)}
        found |= _own_children()
        if not found:
            return True
        number = signal.SIGSTOP if found - stopped else signal.SIGKILL
        for pid in found - stopped or found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        stopped = found if number == signal.SIGSTOP else set()
    return False


def _own_children() -> set[int]:
    """Return the live direct children, including those that `/proc` does not show."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, path.read_text(encoding="ascii").split()))
    return {pid for pid in found if _lives(pid)}


def _lives(child: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def kill_all_others() -> None:
    """Kill, in one system call, all processes to which this one may send a signal.

    Call this only where none of them belongs to others: in a separate process namespace, or under a separate user,
    where it also ends other trial servers of the same study. The kernel allows no fork meanwhile, so that no process
    escapes.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


@contextlib.contextmanager
def others_stopped(*, shares_user: bool) -> Iterator[None]:
    """Stop, in one system call, all processes to which this one may send a signal; let the survivors continue when the
    context ends.

    Call this only where none of them belongs to others, as for `kill_all_others`. The kernel shares cores between
    sessions before it shares them between processes: beside 250 sessions that fork without end, this process gets a
    few thousandths of a core, and searching for them while they run takes minutes.

    Args:
        shares_user: Whether other trial servers may be among them. Two that stopped each other at once would stay
            stopped, so one waits for the other.

    Source: `sched(7)`, "The autogroup feature"
    """
    with _turn_of_user() if shares_user else contextlib.nullcontext():
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGCONT)


@contextlib.contextmanager
def _turn_of_user() -> Iterator[None]:
    """Wait until no other process of this user is inside this context. The wait is short, because user code of the same
    user can hold the lock. It is limited by a number of attempts, because the clock runs on while this process is
    stopped.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        for _ in range(TURN_ATTEMPTS):
            with contextlib.suppress(OSError):
                lock.bind(f"\0steptune-stopping-{os.getuid()}")  # the kernel releases it when this process ends
                break
            time.sleep(TURN_PAUSE_S)
        yield


def prefer_for_oom_kill() -> None:
    """Mark this process and its children to be the first that the kernel kills when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def child_pids() -> list[int]:
    """Return the ids of this process's direct children, without zombies."""
    return [p.pid for p in psutil.Process().children() if not _is_zombie(p.pid)]


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def limit_data(limit_bytes: int) -> None:
    """Limit the private memory of this process, so that an allocation fails instead of exhausting the machine.

    RLIMIT_DATA counts private writable memory (Linux >= 4.7), not the address space that libraries
    and CUDA reserve.
    """
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot (0 where unknown)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def redirect_output(log: str) -> None:
    """Redirect the output of this process to the end of a file, or discard it; its input is empty."""
    path = Path(log) if log else Path(os.devnull)
    if log:
        path.parent.mkdir(parents=True, exist_ok=True)
    sink = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    source = os.open(os.devnull, os.O_RDONLY)
    os.dup2(source, 0)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
