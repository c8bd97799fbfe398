"""Directories in which all users of a machine may write, and where files outlast a trial."""

from __future__ import annotations

import tempfile
from pathlib import Path

SHARED_PLACES = tuple(
    dict.fromkeys(
        Path(place) for place in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock", tempfile.gettempdir())
    )
)
