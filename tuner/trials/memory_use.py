"""Memory that processes take together: private, shared, and files in memory that none of them has mapped.

The kernel's proportional shares count a page once, however many processes have it. Pages of files on a disk do not
count: the kernel takes them back when somebody needs the memory. Page tables do, which a process can grow without
having a single page.

This file is a program, too, handed over as text to a process of the trials' user, who alone may look into them where
we may not: so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ANONYMOUS_DEVICE = (0, 1)
"""Of memory files without a name, and of shared anonymous mappings."""
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)")

File = tuple[tuple[int, int], int]
"""Device and inode."""


@dataclass(frozen=True, kw_only=True)
class Taker:
    """A study that runs on this machine.

    Attributes:
        pid: The process that started its trials, and of which they descend.
        uid: User of its trials and of nobody else; None where they have the user of `pid`.
        as_user: The command that runs another one as that user, where its files lie where everybody may write.
    """

    pid: int
    uid: int | None = None
    as_user: tuple[str, ...] = ()


def processes_of(roots: Collection[int], uid: int | None) -> set[int]:
    """The processes of a user, and these with all that descends from them."""
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if uid is not None and entry.stat().st_uid == uid:
                found.add(int(entry.name))
            stat = Path(entry.path, "stat").read_text(errors="replace")
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
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
    as_user: Sequence[str] = (),
    python: str = sys.executable,
) -> int:
    """Bytes that processes take together, exact where they exceed a limit.

    Args:
        in_memory: Files in memory that are theirs too, and their bytes.
        as_user: The command that runs another one as their user, who may look into them where we may not.
        python: An interpreter that this user can run.
    """
    pids = list(pids)
    rough = {pid: _status(pid) for pid in pids}
    most = sum(values["RssAnon"] + values["VmPTE"] for values in rough.values()) + _field("/proc/meminfo", "Shmem")
    if most <= limit_bytes:
        return most
    if as_user and any(_is_closed(pid) for pid in pids):
        return _seen_by_user(as_user, python, pids, in_memory, most)
    return _exactly(pids, in_memory, most)


def _exactly(pids: Sequence[int], in_memory: dict[File, int], most: int) -> int:
    """What we see; the most that there can be where a process of our user keeps itself from our eyes."""
    if _hidden(pids):
        return most
    rough = {pid: _status(pid) for pid in pids}
    files, private = _files_in_memory(pids)
    files |= {file: size for file, size in in_memory.items() if file[0] not in private}
    taken = sum(files.values()) + sum(private.values())
    return taken + sum(_share_of(pid, rough[pid], files, private) for pid in pids)


def _seen_by_user(
    as_user: Sequence[str], python: str, pids: Sequence[int], in_memory: dict[File, int], most: int
) -> int:
    """Lets this file look with the eyes of another user; the most that there can be where that one disturbs it."""
    from steptune.tuner.trials.as_user import Disturbed, run_as

    question = json.dumps([pids, [[*file, size] for file, size in in_memory.items()], most])
    try:
        done = run_as(as_user, python, "-ISc", Path(__file__).read_text(encoding="utf-8"), given=question)
        return min(most, int(done.stdout))
    except (Disturbed, ValueError):
        return most


def _answer() -> None:
    """In the process of the other user."""
    pids, files, most = json.load(sys.stdin)
    in_memory = {((device[0], device[1]), inode): size for device, inode, size in files}
    sys.stdout.write(str(_exactly(pids, in_memory, most)))


def _is_closed(pid: int) -> bool:
    """Whether we may not see what a process has open."""
    try:
        os.scandir(f"/proc/{pid}/fd").close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _hidden(pids: Iterable[int]) -> bool:
    """Whether processes of our own user are closed to us: they do that on purpose, but for a moment when they begin."""
    for wait_s in (0.1, 0.0):
        pids = [pid for pid in pids if _is_closed(pid) and _user_of(pid) == os.geteuid()]
        if not pids:
            return False
        time.sleep(wait_s)
    return True


def _user_of(pid: int) -> int | None:
    """By what it runs as, not by who owns its folder in `/proc`: that of a closed process is root's."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1])
    return None


def _share_of(pid: int, rough: dict[str, int], files: Collection[File], private: Collection[tuple[int, int]]) -> int:
    """What a process has beside those files; all that it has resident, where it keeps its memory from our eyes."""
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
    """Files in memory that processes hold open, and file systems in memory that only they can see."""
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
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = entry.stat()
                    device = os.major(found.st_dev), os.minor(found.st_dev)
                    if device not in private and (device == ANONYMOUS_DEVICE or device in systems):
                        files[device, found.st_ino] = found.st_blocks * 512
    return {file: size for file, size in files.items() if file[0] not in private}, private


def memory_file_systems(pid: int | str) -> dict[tuple[int, int], str]:
    """Devices of the file systems in memory that a process sees, and where."""
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
    """Bytes by name, of a file of the kernel's that gives kilobytes."""
    lines = (line.partition(":") for line in Path(path).read_text(errors="replace").splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if name in names}


if __name__ == "__main__":
    _answer()
