"""Files of a host, read from a directory: `/` for this host, or a copy of another host's files.

Links are followed inside the directory, as if it were the root: an absolute link in a copy never leads to the files of
the machine that examines it. A file that cannot be read raises a separate error, so that no check takes it for absent.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PurePosixPath

from steptune.tuner.errors import SteptuneError

MAX_BYTES = 1 << 20
"""Maximum size of a file, in bytes; the files that the checks read have a few kilobytes."""
MAX_LINKS = 40
"""Maximum number of symbolic links to follow, as in the kernel."""
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
_NO_VALUE = {errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP}
"""Errno values of sysfs for an attribute that has no value now, such as the speed of a link that is down."""


class UnreadableError(SteptuneError):
    """Error for a file that exists but cannot be read: its state is unknown."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class Tree:
    """File tree of one host.

    Paths are as on that host, with or without a slash at the beginning.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        """Return a file's text, stripped; None where there is no such file, or the kernel has no value for it.

        Raises:
            UnreadableError: The file exists, but cannot be read.
        """
        data = self.data(path)
        return None if data is None else data.decode("utf-8", "replace").strip()

    def data(self, path: str) -> bytes | None:
        """Return a file's content in bytes; None where there is no such file, or the kernel has no value for it."""
        real = self.real(path)
        if real is None:
            return None
        try:
            # A copy may hold anything: opening a pipe would wait for a writer.
            if not stat.S_ISREG(os.stat(self._outside(real)).st_mode):  # noqa: PTH116
                raise UnreadableError(path, "not a regular file")
            descriptor = os.open(self._outside(real), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                return file.read(MAX_BYTES)
        except OSError as error:
            if error.errno in _ABSENT | _NO_VALUE:
                return None
            raise UnreadableError(path, _reason(error)) from None

    def number(self, path: str) -> int | None:
        """Return the integer in a file; None where it is absent or holds something else."""
        text = self.text(path)
        try:
            return int(text) if text is not None else None
        except ValueError:
            return None

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, in order; empty where there is no directory.

        Raises:
            UnreadableError: The directory exists, but cannot be listed.
        """
        real = self.real(path)
        if real is None:
            return []
        try:
            return sorted(os.listdir(self._outside(real)))  # noqa: PTH208
        except OSError as error:
            if error.errno in _ABSENT | _NO_VALUE:
                return []
            raise UnreadableError(path, _reason(error)) from None

    def exists(self, path: str) -> bool:
        return self.real(path) is not None

    def real(self, path: str) -> str | None:
        """Return the path without symbolic links, from the host's root; None where nothing is there.

        Raises:
            UnreadableError: A directory on the way may not be searched, or links form a cycle.
        """
        parts = _parts(path)
        done: list[str] = []
        links = 0
        while parts:
            part = parts.pop()
            if part == "..":
                del done[-1:]
                continue
            here = "/".join([*done, part])
            try:
                if not stat.S_ISLNK(os.lstat(self._outside(here)).st_mode):
                    done.append(part)
                    continue
                target = os.readlink(self._outside(here))  # noqa: PTH115
            except OSError as error:
                if error.errno in _ABSENT:
                    return None
                raise UnreadableError(path, _reason(error)) from None
            except ValueError:  # a zero byte
                return None
            links += 1
            if links > MAX_LINKS:
                raise UnreadableError(path, "symbolic links form a loop")
            if target.startswith("/"):
                done.clear()
            parts += _parts(target)
        return "/".join(done)

    def _outside(self, inside: str) -> str:
        return os.path.join(self.root, inside)  # noqa: PTH118  (bytes of names that are not UTF-8 pass through)


def _parts(path: str) -> list[str]:
    """Return the components of a path in reverse order, so that `pop` returns the first one."""
    return [part for part in reversed(PurePosixPath(path).parts) if part != "/"]


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
