"""Reading files from a directory in which user code may write.

It may have put links, pipes or folders where files are expected, also above them, and may do so at any moment. So
every folder is opened from the one before, and no link is ever followed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_below(root: Path, path: Path) -> BinaryIO:
    """Open an ordinary file for reading.

    Args:
        root: A directory that user code cannot replace; what is in it, it may.
        path: The file, somewhere below.

    Raises:
        OSError: It does not exist, is no ordinary file, or a link is on the way.
    """
    *folders, name = path.relative_to(root).parts
    folder = os.open(root, _FOLDER)
    try:
        for part in folders:
            below = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        descriptor = os.open(name, _FILE, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
