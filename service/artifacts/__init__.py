"""Artifacts, addressed by their content: uploads, traces and other data too large for a database row.

`store.py` writes and reads them; `files.py` is their location (a directory, or a URL that fsspec knows); `lock.py`
keeps garbage collection (`steptune.service.housekeeping`) away from what is being put.
"""

from steptune.service.artifacts.opening import open_artifacts
from steptune.service.artifacts.store import ArtifactStore, Kept

__all__ = ["ArtifactStore", "Kept", "open_artifacts"]
