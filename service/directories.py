"""Directories of studies that workers ran on this machine, and their removal.

A worker leaves a mark for each directory, outside of it, where user code cannot write. A directory without a mark
belongs to a command, whose report refers to it, and stays.
"""

from __future__ import annotations

import hashlib
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine

from steptune.service.artifacts.retention import ENDED_STATES
from steptune.service.connections import place_of, storage_errors, writing
from steptune.service.fencing import database_now
from steptune.service.isolation.users import take_back
from steptune.service.models import QueueEntryRow, StudyRow


def mark(engine: Engine, data_directory: Path, study_id: str) -> None:
    """Record that a worker made the directory of a study.

    Raises:
        StoreError: The mark cannot be written.
    """
    marks = _marks(engine, data_directory)
    with storage_errors(str(marks)):
        marks.mkdir(parents=True, exist_ok=True)
        (marks / study_id).touch()


def remove_directories(engine: Engine, data_directory: Path, *, grace_s: float) -> int:
    """Remove directories of studies that ended longer ago than the grace period, or are deleted; return how many.

    By then, the files worth keeping are artifacts.

    Raises:
        StoreError: The database cannot be used, or a directory cannot be moved away.
    """
    removed = 0
    for found in sorted(_marks(engine, data_directory).glob("*")):
        directory = data_directory / "studies" / found.name
        trash = directory.with_name(f"{found.name}.removed")
        if not _moved_away(engine, directory, trash, grace_s):
            continue
        if trash.exists():
            take_back(trash)
            remove_tree(trash)
        if not trash.exists():
            found.unlink(missing_ok=True)
            removed += 1
    return removed


def remove_tree(path: Path) -> None:
    """Remove a directory that user code wrote into, as far as possible: it may be nested deeper than Python can
    recurse.
    """
    subprocess.run(["rm", "-rf", "--", str(path)], capture_output=True, check=False)


def _marks(engine: Engine, data_directory: Path) -> Path:
    """Return the folder in which the study directories of one database are recorded. Each database has its own, because
    workers of several databases may share a data directory without knowing each other's studies.
    """
    place = place_of(engine)
    return data_directory / "worker_studies" / hashlib.sha256(place.encode()).hexdigest()[:12]


def _moved_away(engine: Engine, directory: Path, trash: Path, grace_s: float) -> bool:
    """Move a study's directory to the trash while its queue entry is locked, so that no worker can claim the study
    meanwhile. Return False if the study still needs it.
    """
    with writing(engine) as session:
        entry = session.get(QueueEntryRow, directory.name, with_for_update=True)
        study = session.get(StudyRow, directory.name)
        now = database_now(session)
        if study is not None and (entry is None or not _is_over(study, entry, now - timedelta(seconds=grace_s), now)):
            return False
        with storage_errors(str(directory)):
            if directory.exists() and not trash.exists():
                directory.rename(trash)
    return True


def _is_over(study: StudyRow, entry: QueueEntryRow, before: datetime, now: datetime) -> bool:
    held = entry.lease_until is not None and entry.lease_until > now
    ended_at = entry.ended_at
    return study.state in ENDED_STATES and not held and ended_at is not None and ended_at < before
