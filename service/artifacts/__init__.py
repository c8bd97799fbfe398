"""Files by their content: uploads, traces and other things too large for a row.

`store.py` puts and gives; `files.py` is where they lie (a directory, or a URL that fsspec knows); `lock.py` keeps
garbage collection (`steptune.service.housekeeping`) away from what is being put.
"""

from steptune.service.artifacts.opening import open_artifacts
from steptune.service.artifacts.store import ArtifactStore, Kept

__all__ = ["ArtifactStore", "Kept", "open_artifacts"]
