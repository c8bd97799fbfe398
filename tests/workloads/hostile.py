"""A workload that trains well as it is, and under a candidate does what no workload should.

A deed is done where operators use three threads: so the baseline is fine, and the candidate is not. What a deed finds
out it writes into the study's directory, where the test reads it.
"""

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from regression import Regression


def _fork() -> None:
    """Every child forks too; none ends by itself."""
    while True:
        with contextlib.suppress(OSError):
            os.fork()


def _fork_away() -> None:
    """Fork without end, each in a session of its own, so that no group of processes holds them together."""
    while True:
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                os.setsid()


def _fill_memory() -> None:
    """Each process stays below its own limit; together they take everything."""
    hoard = []
    with contextlib.suppress(OSError):
        for _ in range(64):
            if os.fork() == 0:
                break
    while True:
        with contextlib.suppress(MemoryError):
            hoard.append(bytearray(os.urandom(1 << 16) * 128))


GIB = 1 << 30
EXIT = 93 if platform.machine() == "aarch64" else 60
"""Number of the call that ends one thread."""


def _take_alone() -> None:
    """Two GiB in one process."""
    _hold(bytearray(2 * GIB))


def _take_by_many() -> None:
    """Two GiB in 16 processes, each of which keeps itself from the eyes of others."""
    for _ in range(16):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
            _hold(bytearray(GIB // 8))
    time.sleep(600)


def _take_shared() -> None:
    """Two GiB that nobody has alone."""
    _hold(mmap.mmap(-1, 2 * GIB))


def _take_by_files() -> None:
    """Two GiB in files without a name, none of them mapped."""
    _fill_descriptors([os.memfd_create(str(number)) for number in range(64)])


def _take_by_devices() -> None:
    """Two GiB in /dev/shm, in files that have no name any more."""
    found = []
    for number in range(64):
        path = Path("/dev/shm") / f"hostile-{os.getpid()}-{number}"
        found.append(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.unlink()
    _fill_descriptors(found)


def _take_tables() -> None:
    """Page tables without pages."""
    regions = [mmap.mmap(-1, 64 * GIB, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) for _ in range(16)]
    for region in regions:
        for place in range(0, len(region), 2 << 20):
            region[place]
    time.sleep(600)


def _take_system_v() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.shmget(0, ctypes.c_size_t(2 * GIB), 0o1600) < 0:
        raise OSError(ctypes.get_errno(), "no shared memory of System V")
    time.sleep(600)


def _memory_files() -> list[int]:
    """Files without a name, with two GiB together."""
    found = [os.memfd_create(str(number)) for number in range(64)]
    for descriptor in found:
        for _ in range(8):
            os.write(descriptor, bytes(4 << 20))
    return found


def _take_in_flight() -> None:
    """Files in memory that no process has open: they are on their way through a socket."""
    near, far = socket.socketpair()
    for descriptor in _memory_files():
        socket.send_fds(near, [b"x"], [descriptor])
        os.close(descriptor)
    time.sleep(600)
    far.close()


def _take_beside() -> None:
    """Files that only one thread has open, in a table of its own."""

    def hoard() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x400):
            raise OSError(ctypes.get_errno(), "no table of descriptors of its own")
        _memory_files()
        time.sleep(600)

    failures: list[BaseException] = []
    thread = threading.Thread(target=lambda: _kept(hoard, failures), daemon=True)
    thread.start()
    thread.join()
    raise failures[0]


def _kept(deed: Callable[[], object], failures: list[BaseException]) -> None:
    try:
        deed()
    except BaseException as error:
        failures.append(error)


def _take_behind() -> None:
    """Four processes whose first thread has ended: the kernel shows them as if they were dead."""
    for _ in range(4):
        if os.fork() == 0:
            threading.Thread(target=lambda: _hold(bytearray(GIB // 2))).start()
            ctypes.CDLL(None).syscall(EXIT, 0)
    time.sleep(600)


def _take_by_orphans() -> None:
    """Processes that nobody of the trial descends to, and that keep themselves from the eyes of others."""
    for _ in range(4):
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
                _hold(bytearray(GIB // 2))
            os._exit(0)
    time.sleep(600)


def _take_by_mapping() -> None:
    """A file in /dev/shm that is mapped, without a name and not open."""
    held = []
    for number in range(32):
        path = Path("/dev/shm") / f"hostile-{os.getpid()}-{number}"
        with path.open("w+b") as file:
            file.truncate(GIB // 16)
            held.append(mmap.mmap(file.fileno(), GIB // 16))
        path.unlink()
    for memory in held:
        for place in range(0, len(memory), 4096):
            memory[place] = 1
    time.sleep(600)


def _take_by_ring() -> None:
    """Files that a ring of io_uring has open, and no process."""
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    if ring < 0:
        raise OSError(ctypes.get_errno(), "no io_uring")
    files = _memory_files()
    libc.syscall(427, ring, 2, (ctypes.c_int * len(files))(*files), len(files))
    for file in files:
        os.close(file)
    time.sleep(600)


def _take_secret() -> None:
    """Memory that the kernel hides from itself: so much in each process as it may lock, which is little."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(447, 0) < 0:
        raise OSError(ctypes.get_errno(), "no secret memory")
    time.sleep(600)


def _take_by_sockets() -> None:
    """Two GiB in the buffers of sockets."""
    held, taken = [], 0
    while taken < 2 * GIB:
        pair = socket.socketpair()
        held.append(pair)
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
            end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken += end.send(bytes(1 << 16))
    time.sleep(600)


def _take_by_network() -> None:
    """Two GiB in the buffers of connections over loopback."""
    held, taken = [], 0
    server = socket.create_server(("127.0.0.1", 0))
    while taken < 2 * GIB:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        held += [near, far]
        for end in (near, far):
            end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken += end.send(bytes(1 << 16))
    time.sleep(600)


def _take_by_pipes() -> None:
    """Two GiB in pipes, by many processes."""
    for _ in range(16):
        if os.fork() == 0:
            break
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held, taken = [], 0
    with contextlib.suppress(OSError):
        while taken < GIB // 8:
            ends = os.pipe()
            held.append(ends)
            with contextlib.suppress(OSError):
                fcntl.fcntl(ends[1], 1031, 1 << 20)
            os.set_blocking(ends[1], False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken += os.write(ends[1], bytes(1 << 16))
    time.sleep(600)


def _fill_descriptors(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        for _ in range(8):
            os.write(descriptor, bytes(4 << 20))
    time.sleep(600)


def _hold(memory) -> None:
    for place in range(0, len(memory), 4096):
        memory[place] = 1
    time.sleep(600)


def _take_part() -> None:
    """Less than the limit, for a while."""
    memory = bytearray(600 << 20)
    for place in range(0, len(memory), 4096):
        memory[place] = 1
    time.sleep(6)


def _fill_disk(folder: Path) -> None:
    number = 0
    while True:
        number += 1
        (folder / f"hostile-{number}").write_bytes(bytes(4 << 20))


def _one_large_file(folder: Path) -> None:
    with (folder / "hostile").open("wb") as file:
        while True:
            file.write(bytes(4 << 20))


def _sleep() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)


def _connections() -> list[int]:
    """Descriptors of the sockets that were there before: one leads to the trial server."""
    found = []
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found.append(descriptor)
    return found


def _write_to_parent(data: bytes, times: int = 1) -> None:
    for descriptor in _connections():
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, True)
            for _ in range(times):
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
    time.sleep(60)


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


def _kill_everybody() -> None:
    """Whoever may be signalled, the server and its parent first."""
    for pid in (os.getppid(), *map(int, (path.name for path in Path("/proc").glob("[0-9]*")))):
        if pid not in (1, os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    time.sleep(60)


def _leave_orphans() -> None:
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                command = [sys.executable, "-c", "import time; time.sleep(600)"]
                subprocess.Popen(command, start_new_session=True)
                time.sleep(600)
            os._exit(0)


DEEDS: dict[str, Callable[[], object]] = {
    "fork": _fork,
    "fork_away": _fork_away,
    "fill_memory": _fill_memory,
    "take_alone": _take_alone,
    "take_by_many": _take_by_many,
    "take_shared": _take_shared,
    "take_by_files": _take_by_files,
    "take_by_devices": _take_by_devices,
    "take_tables": _take_tables,
    "take_system_v": _take_system_v,
    "take_in_flight": _take_in_flight,
    "take_beside": _take_beside,
    "take_behind": _take_behind,
    "take_by_orphans": _take_by_orphans,
    "take_by_mapping": _take_by_mapping,
    "take_by_ring": _take_by_ring,
    "take_secret": _take_secret,
    "take_by_sockets": _take_by_sockets,
    "take_by_network": _take_by_network,
    "take_by_pipes": _take_by_pipes,
    "take_part": _take_part,
    "sleep": _sleep,
    "write_garbage": lambda: _write_to_parent(_framed(b"\xc1" * 100)),
    "announce_gigabytes": lambda: _write_to_parent((0xFFFFFFFF).to_bytes(4, "little") + bytes(1 << 20), 1 << 12),
    "write_for_ever": lambda: _write_to_parent(
        _framed(b"\x82\xa4type\xacTaskProgress\xa4text\xda\x7f\xff" + b"x" * 0x7FFF), 1 << 20
    ),
    "kill_everybody": _kill_everybody,
    "leave_orphans": _leave_orphans,
}


class Hostile(Regression):
    """Does a deed in the first step of the candidate; `look` is told what to look at."""

    def __init__(self, deed: str = "none", look: str = "") -> None:
        super().__init__()
        self._deed = deed
        self._look = look
        self._done = False

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if torch.get_num_threads() == 3 and not self._done:
            self._done = True
            self._do()
        return super().loss(model, batch)

    def _do(self) -> None:
        folder = Path(self.directory)
        folder.mkdir(exist_ok=True)
        if self._deed == "look":
            (folder / "seen.json").write_text(json.dumps(_look_around(self._look.split("|"))))
        elif self._deed == "fill_disk":
            _fill_disk(folder)
        elif self._deed == "fill_temporary":
            _fill_disk(Path(os.environ["TMPDIR"]))
        elif self._deed.startswith("fill /"):
            place = Path(self._deed.removeprefix("fill ")) / f"hostile-{os.getpid()}"
            place.mkdir(mode=0o700)
            _fill_disk(place)
        elif self._deed == "one_large_file":
            _one_large_file(folder)
        elif self._deed != "none":
            DEEDS[self._deed]()


def _look_around(paths: list[str]) -> dict:
    return {
        "read": {path: _attempt(lambda path=path: str(len(Path(path).read_bytes()))) for path in paths},
        "written": {path: _attempt(lambda path=path: Path(path).open("a").close()) for path in paths},
        "connected": _attempt(lambda: socket.create_connection(("192.0.2.1", 9), timeout=0.5)),
        "loopback": _attempt(_use_loopback),
        "environment": dict(os.environ),
        "pids": sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")),
        "ids": [os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()],
        "status": dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()),
        "raised": _attempt(_raise_limit),
        "root": sorted(path.name for path in Path("/").iterdir()),
    }


def _attempt(deed: Callable[[], object]) -> str:
    try:
        return f"yes {deed() or ''}"
    except OSError as error:
        return f"no {type(error).__name__} {error.errno}"
    except ValueError as error:
        return f"no {error}"


def _use_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def _raise_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (hard + 1, hard + 1))
