"""Memory that processes take together: private, shared, and files in memory that none of them has mapped.

The kernel's proportional shares count a page once, however many processes have it. Pages of files on a disk do not
count: the kernel takes them back when somebody needs the memory. Page tables do, which a process can grow without
having a single page.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
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


def memory_of(pids: Iterable[int], limit_bytes: int, in_memory: dict[File, int]) -> int:
    """Bytes that processes take together, exact where they exceed a limit.

    Args:
        in_memory: Files in memory that are theirs too, and their bytes.
    """
    pids = list(pids)
    rough = {pid: _status(pid) for pid in pids}
    most = sum(values["RssAnon"] + values["VmPTE"] for values in rough.values()) + _field("/proc/meminfo", "Shmem")
    if most <= limit_bytes:
        return most
    files, private = _files_in_memory(pids)
    files |= {file: size for file, size in in_memory.items() if file[0] not in private}
    taken = sum(files.values()) + sum(private.values())
    return taken + sum(_share_of(pid, rough[pid], files, private) for pid in pids)


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
