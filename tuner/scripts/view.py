"""Copy-on-write view of a folder: only this process and those that it starts see what they write there.

An overlay of the kernel is put over the folder, in a mount namespace of its own (overlayfs, Documentation/filesystems/
overlayfs.rst). A file is copied when it is first written to, not before. File systems mounted below the folder get an
overlay each. Root needs no user namespace, in which CUDA may refuse to start; other users need one, and some systems
forbid it.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from steptune.tuner.errors import SteptuneError

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
MS_LOCKED = 0x2 | 0x4 | 0x8
"""Mount flags (no setuid, devices or programs) that a user namespace may not remove; equal to the flags of `statvfs`.
"""
MNT_DETACH = 2
KEPT_TYPES = frozenset({"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "bpf", "securityfs"})
"""Types of file systems that hold no ordinary files; a view shows them unchanged."""
CUDA_NO_DEVICE = 100


class ViewError(SteptuneError):
    """Error for a system that cannot make a copy-on-write view, with the reason."""


def enter_view(folder: Path, scratch: Path) -> None:
    """Move this process, which must have a single thread, into a view of a folder, and make the view its working
    directory.

    Args:
        folder: An absolute path.
        scratch: Empty folder outside it, where writes are kept.

    Raises:
        ViewError: The system forbids it, or CUDA starts only outside the view. The process is then unusable.
    """
    if scratch.resolve().is_relative_to(folder):
        raise ViewError(
            f"{folder} contains the temporary directory {scratch.parent}: set TMPDIR to a folder outside of it"
        )
    outside = _cuda_status()
    _unshare()
    try:
        _cover(folder, scratch)
    except OSError as error:
        raise ViewError(f"this system does not allow mounts in a namespace ({error.strerror})") from None
    os.chdir(folder)
    if outside == 0 and _cuda_status() != 0:
        raise ViewError("CUDA does not start in a user namespace here")


def _cover(folder: Path, scratch: Path) -> None:
    """Mount overlays over a folder and over the file systems mounted below it."""
    below = _mounts_below(folder)
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    original = scratch / "original"
    original.mkdir()
    _mount(str(folder), str(original), "", MS_BIND | MS_REC)
    for number, (target, kind) in enumerate([(folder, ""), *below]):
        source = original / target.relative_to(folder)
        if kind in KEPT_TYPES:
            _mount(str(source), str(target), "", MS_BIND | MS_REC)
        elif not target.is_dir():
            _show_file(source, target)
        else:
            _overlay(source, target, scratch / str(number))
    # The overlays hold what they need. Under this path, a script that tidies the temporary directory would find the
    # folder itself.
    _call("umount2", os.fsencode(original), MNT_DETACH)


def _show_file(source: Path, target: Path) -> None:
    """Mount a file read-only, because no overlay can be put over a file."""
    _mount(str(source), str(target), "", MS_BIND)
    locked = os.statvfs(target).f_flag & MS_LOCKED
    _mount("none", str(target), "", MS_REMOUNT | MS_BIND | MS_RDONLY | locked)


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    try:
        _call("unshare", CLONE_NEWNS)
    except OSError:
        try:
            _call("unshare", CLONE_NEWNS | CLONE_NEWUSER)
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
        except OSError as error:
            raise ViewError(f"this system does not allow mount namespaces ({error.strerror})") from None


def _overlay(source: Path, target: Path, layer: Path) -> None:
    """Mount an overlay; its upper layer is in memory if the temporary directory's file system cannot hold one."""
    try:
        _try_overlay(source, target, layer)
    except OSError:
        memory = layer.with_name(f"{layer.name}-memory")
        memory.mkdir()
        try:
            _mount("tmpfs", str(memory), "tmpfs", 0)
            _try_overlay(source, target, memory / "layer")
        except OSError as error:
            raise ViewError(f"an overlay over {target} cannot be mounted ({error.strerror})") from None


def _try_overlay(source: Path, target: Path, layer: Path) -> None:
    upper, work = layer / "upper", layer / "work"
    for made in (upper, work):
        made.mkdir(parents=True)
    upper.chmod(target.stat().st_mode & 0o7777)
    options = ",".join(f"{name}={_escaped(path)}" for name, path in _layers(source, upper, work))
    try:
        _mount("overlay", str(target), "overlay", 0, f"{options},userxattr")
    except OSError:  # root outside of user namespaces may do without, as before Linux 5.11
        _mount("overlay", str(target), "overlay", 0, options)


def _layers(source: Path, upper: Path, work: Path) -> tuple[tuple[str, Path], ...]:
    return ("lowerdir", source), ("upperdir", upper), ("workdir", work)


def _escaped(path: Path) -> str:
    text = str(path).replace("\\", "\\\\")
    return text.replace(":", "\\:").replace(",", "\\,")


def _mounts_below(folder: Path) -> list[tuple[Path, str]]:
    """Return the mount points below a folder with their types, each after the mount points that contain it."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n")[:-1]:
        fields, _, rest = line.partition(b" - ")
        name = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), fields.split(b" ")[4])
        point = Path(os.fsdecode(name))
        if point != folder and point.is_relative_to(folder):
            found[point] = rest.split(b" ")[0].decode()
    return sorted(found.items(), key=lambda item: len(item[0].parts))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    names = os.fsencode(source), os.fsencode(target)
    _call("mount", *names, kind.encode(), ctypes.c_ulong(flags), os.fsencode(options) or None)


def _call(name: str, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _cuda_status() -> int:
    """Return the status of `cuInit` in a separate process; a missing driver counts as no device."""
    child = os.fork()
    if child == 0:
        status = CUDA_NO_DEVICE
        try:
            status = ctypes.CDLL("libcuda.so.1").cuInit(0)
        except OSError:
            pass
        finally:
            os._exit(min(status, 255))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
