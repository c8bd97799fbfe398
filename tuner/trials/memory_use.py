"""Total memory of processes: private, shared, unmapped files in memory, and the kernel's buffers for sockets and pipes.

The kernel's proportional shares count a page once, however many processes map it. Pages of files on a disk do not
count: the kernel reclaims them when memory is needed. Page tables count: a process can grow them without having a
single page. The kernel shows the fill of a socket's buffers only to its owner: they count as full, up to the growth of
the kernel's own memory.

This file also runs as a program, passed as text to a process of the trials' user, who may read processes that we may
not: so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ANONYMOUS_DEVICE = (0, 1)
"""Device number of unnamed memory files and of shared anonymous mappings."""
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)")

File = tuple[tuple[int, int], int]
"""Identity of a file: device and inode."""


@dataclass(frozen=True, kw_only=True)
class Taker:
    """Study that runs on this machine and uses its memory.

    Attributes:
        pid: Process that started its trials, which are its descendants.
        uid: User of its trials alone; None where they run as the user of `pid`.
        as_user: Command prefix that runs a command as that user, where it has files in directories that all users may
            write.
    """

    pid: int
    uid: int | None = None
    as_user: tuple[str, ...] = ()


def processes_of(roots: Collection[int], uid: int | None) -> set[int]:
    """Return the ids of the processes `roots` and all of their descendants, and of all processes of the user `uid`, if
    given.
    """
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if uid is not None and entry.stat().st_uid == uid:
                found.add(int(entry.name))
            told = Path(entry.path, "stat").read_text(errors="replace")
            children.setdefault(int(told.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    pending = list(roots)
    while pending:
        pid = pending.pop()
        found.add(pid)
        pending += children.pop(pid, ())
    return found


def memory_of(
    pids: Iterable[int],
    limit_bytes: int,
    in_memory: dict[File, int],
    *,
    buffers_bytes: int = 0,
    as_user: Sequence[str] = (),
    python: str = sys.executable,
) -> int:
    """Return the bytes that processes use together: an upper bound if the bound is within the limit, else the exact
    number.

    Args:
        in_memory: Further files in memory that belong to the processes, with their bytes.
        buffers_bytes: Maximum bytes of the kernel's buffers for all processes.
        as_user: Command prefix that runs a command as their user, who may read processes that we may not.
        python: An interpreter that this user can run.
    """
    pids = [_living_thread(pid) for pid in pids]
    rough = {pid: _status(pid) for pid in pids}
    tables = sum(values["VmPTE"] for values in rough.values())
    if tables > limit_bytes:  # walking through them to count pages would take seconds
        return tables
    most = sum(values["RssAnon"] for values in rough.values()) + tables
    most += _field("/proc/meminfo", "Shmem") + buffers_bytes
    if most <= limit_bytes:
        return most
    if as_user and any(_is_closed(pid) for pid in pids):
        return _seen_by_user(as_user, python, pids, in_memory, most, buffers_bytes)
    return _exactly(pids, in_memory, most, buffers_bytes)


def kernel_bytes() -> int:
    """Return the bytes of the kernel's own memory that it cannot reclaim, including buffers of sockets and pipes."""
    names = ("Buffers", "Cached", "SwapCached", "AnonPages", "PageTables", "KernelStack", "SReclaimable")
    found = _fields("/proc/meminfo", ("MemTotal", "MemFree", *names))
    return found["MemTotal"] - found["MemFree"] - sum(found.get(name, 0) for name in names)


def _exactly(pids: Sequence[int], in_memory: dict[File, int], most: int, buffers_bytes: int) -> int:
    """Return the observed bytes, or the upper bound `most` if a process of our user hides memory."""
    if _hidden(pids):
        return most
    rough = {pid: _status(pid) for pid in pids}
    files, private = _files_in_memory(pids)
    files |= {file: size for file, size in in_memory.items() if file[0] not in private}
    taken = sum(files.values()) + sum(private.values()) + min(buffers_bytes, _buffers_of(pids))
    return taken + sum(_share_of(pid, rough[pid], files, private) for pid in pids)


def _seen_by_user(
    as_user: Sequence[str], python: str, pids: Sequence[int], in_memory: dict[File, int], most: int, buffers_bytes: int
) -> int:
    """Measure the memory by running this file as the user of the processes; return the upper bound `most` if that user
    disturbs the run.
    """
    from steptune.tuner.trials.as_user import DisturbedError, run_as

    question = json.dumps([pids, [[*file, size] for file, size in in_memory.items()], most, buffers_bytes])
    try:
        done = run_as(as_user, python, "-ISc", Path(__file__).read_text(encoding="utf-8"), given=question)
        return min(most, int(done.stdout))
    except (DisturbedError, ValueError):
        return most


def _answer() -> None:
    """Answer a request on standard input, in the process of the other user."""
    pids, files, most, buffers_bytes = json.load(sys.stdin)
    in_memory = {((device[0], device[1]), inode): size for device, inode, size in files}
    sys.stdout.write(str(_exactly(pids, in_memory, most, buffers_bytes)))


def _is_closed(pid: int) -> bool:
    """Say whether this process lacks permission to list another process's open files."""
    try:
        os.scandir(f"/proc/{pid}/fd").close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _living_thread(pid: int) -> int:
    """Return a live thread of a process if its first thread has ended, because the kernel then shows nothing under the
    process id. Else return the process id.
    """
    with contextlib.suppress(OSError):
        if _state(pid) == "Z":
            tids = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
            return next((tid for tid in tids if _state(tid) != "Z"), pid)
    return pid


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]


def _hidden(pids: Collection[int]) -> bool:
    """Say whether processes of our own user stay unreadable, or files sent between them stay in transit.

    Either state is normal for a moment; a longer one is deliberate.
    """
    closed, passing = _closed(pids), _passing(pids)
    if not closed and not passing:
        return False
    time.sleep(0.1)
    return bool(_closed(closed) or passing & _passing(pids))


def _closed(pids: Iterable[int]) -> set[int]:
    return {pid for pid in pids if _is_closed(pid) and _user_of(pid) == os.geteuid()}


def _passing(pids: Iterable[int]) -> set[int]:
    """Return the inodes of sockets that hold descriptors in transit: sent, but not yet received by any process."""
    found = set()
    for pid, descriptor, status in _open_files(pids):
        if stat.S_ISSOCK(status.st_mode) and status.st_ino not in found:
            with contextlib.suppress(OSError):
                told = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(errors="replace")
                if int(told.partition("scm_fds:")[2].split()[0] if "scm_fds:" in told else 0):
                    found.add(status.st_ino)
    return found


def _open_files(pids: Iterable[int]) -> Iterator[tuple[int, str, os.stat_result]]:
    """Yield the process, the descriptor and the file status of each open file."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    yield pid, path.name, path.stat()


def _buffers_of(pids: Iterable[int]) -> int:
    """Return the maximum bytes that the sockets and pipes of processes can hold."""
    kinds = {status.st_ino: status.st_mode for _, _, status in _open_files(pids)}
    sockets, pipes = (sum(map(of_kind, kinds.values())) for of_kind in (stat.S_ISSOCK, stat.S_ISFIFO))
    page = os.sysconf("SC_PAGE_SIZE")
    usual = _setting("fs/pipe-user-pages-soft") * page  # of one user; beyond it a pipe has two pages
    return sockets * _of_a_socket() + min(pipes * _setting("fs/pipe-max-size"), usual + pipes * 2 * page)


def _of_a_socket() -> int:
    """Return the maximum bytes of a socket's buffers in both directions; the kernel allocates twice the size that it
    reports.
    """
    named = 2 * (_setting("net/core/wmem_max") + _setting("net/core/rmem_max"))
    return max(named, _setting("net/ipv4/tcp_wmem") + _setting("net/ipv4/tcp_rmem"))


def _setting(name: str) -> int:
    """Return the last number of a kernel setting, which is its maximum."""
    try:
        return int(Path("/proc/sys", name).read_text(encoding="ascii").split()[-1])
    except OSError:  # not shown inside of a container
        return 8 << 20


def _user_of(pid: int) -> int | None:
    """Return the user that a process runs as. The owner of its folder in `/proc` may differ: for an unreadable process
    it is root.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1])
    return None


def _share_of(pid: int, rough: dict[str, int], files: Collection[File], private: Collection[tuple[int, int]]) -> int:
    """Return the memory of a process, excluding the given memory files and memory file systems; if details cannot be
    read, return all of its resident memory.
    """
    try:
        shares = _fields(f"/proc/{pid}/smaps_rollup", ("Pss_Anon", "Pss_Shmem"))
        counted = 0
        here = False
        if shares["Pss_Shmem"] and (files or private):
            for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
                if mapping := _MAPPING.match(line):
                    device = int(mapping[1], 16), int(mapping[2], 16)
                    here = device in private or (device, int(mapping[3])) in files
                elif here and line.startswith("Pss:"):
                    counted += int(line.split()[1]) * 1024
        return shares["Pss_Anon"] + max(0, shares["Pss_Shmem"] - counted) + rough["VmPTE"]
    except (OSError, KeyError):  # closed to us, gone, or an old kernel
        return sum(rough.values())


def _files_in_memory(pids: Iterable[int]) -> tuple[dict[File, int], dict[tuple[int, int], int]]:
    """Return the bytes of each memory file that processes hold open, and of each memory file system that only they can
    see.
    """
    ours = set(memory_file_systems("self"))
    files: dict[File, int] = {}
    private: dict[tuple[int, int], int] = {}
    for pid in pids:
        systems = memory_file_systems(pid)
        for device, place in systems.items():
            if device not in ours and device not in private:
                with contextlib.suppress(OSError):
                    system = os.statvfs(f"/proc/{pid}/root{place}")
                    private[device] = (system.f_blocks - system.f_bfree) * system.f_frsize
        for _, _, found in _open_files([pid]):
            device = os.major(found.st_dev), os.minor(found.st_dev)
            if device not in private and (device == ANONYMOUS_DEVICE or device in systems):
                files[device, found.st_ino] = found.st_blocks * 512
    return {file: size for file, size in files.items() if file[0] not in private}, private


def memory_file_systems(pid: int | str) -> dict[tuple[int, int], str]:
    """Return the memory file systems that a process sees, as mount points by device."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if after.split()[0] in ("tmpfs", "ramfs"):
                _, _, device, _, place = before.split()[:5]
                major, _, minor = device.partition(":")
                found[int(major), int(minor)] = place
    return found


def _status(pid: int) -> dict[str, int]:
    names = ("RssAnon", "RssShmem", "VmPTE")
    try:
        return dict.fromkeys(names, 0) | _fields(f"/proc/{pid}/status", names)
    except OSError:
        return dict.fromkeys(names, 0)


def _field(path: str, name: str) -> int:
    return _fields(path, (name,))[name]


def _fields(path: str, names: Collection[str]) -> dict[str, int]:
    """Return named values of a kernel file, converted from kilobytes to bytes."""
    lines = (line.partition(":") for line in Path(path).read_text(errors="replace").splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if name in names}


if __name__ == "__main__":
    _answer()
