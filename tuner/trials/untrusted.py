"""Safe reading of files from a directory in which user code may write.

User code may put links, pipes or folders in the place of files or of the folders above them, at any moment. So every
folder is opened from the one before, and no link is ever followed.
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
    """Open a regular file below a directory for reading, without following links.

    Args:
        root: Directory that user code cannot replace, although it may replace its contents.
        path: File below the root.

    Raises:
        OSError: The file does not exist or is no ordinary file, or the path contains a link.
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
