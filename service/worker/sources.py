"""Uploaded workloads on a worker: unpacked below the study's directory, never imported here."""

from __future__ import annotations

import shutil
from pathlib import Path

from steptune.service.archives import DEFAULT_LIMITS, checked_parts, unpack
from steptune.service.artifacts import ArtifactStore
from steptune.service.directories import remove_tree
from steptune.service.queue.records import SCRIPT, Source
from steptune.tuner.records import Study


def fetch_source(source: Source | None, study: Study, artifacts: ArtifactStore, folder: Path) -> str:
    """Unpack an upload into a folder. An existing folder is replaced, because user code may have changed its content.

    Returns:
        The reference of the workload on this machine; of a script its command, which runs in the folder.

    Raises:
        StoreError: The upload is no longer stored; ArchiveRefusedError if it may not be unpacked.
    """
    if source is None or source.digest is None:
        return study.workload
    remove_tree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with artifacts.local_copy(source.digest) as upload:
        if source.kind in ("archive", SCRIPT):
            unpack(upload, folder)
        else:
            name, _, _ = source.entry.partition("?")[0].rpartition(":")
            target = folder.joinpath(*checked_parts(name, DEFAULT_LIMITS))
            target.parent.mkdir(parents=True)
            shutil.copyfile(upload, target)
    return source.entry if source.kind == SCRIPT else f"{folder}/{source.entry}"
