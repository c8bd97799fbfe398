"""Deletion of a study: its rows, and its working files."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import delete

from steptune.service.artifacts import open_artifacts
from steptune.service.artifacts.collection import collect_garbage
from steptune.service.connections import writing
from steptune.service.models import StudyRow
from steptune.service.queries.studies import version_of_study
from steptune.service.queue import StudyQueue
from steptune.service.settings import Settings
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import StateConflictError, StorageFullError
from steptune.tuner.records import Study

LOCK_FILE = "command.lock"
"""Lock file in a study's directory; held by the command that runs the study, and released however the command ends."""


@contextlib.contextmanager
def run_by_this_command(study: Study) -> Iterator[None]:
    """Lock a study, so that no other command of this machine runs or deletes it meanwhile.

    Raises:
        StateConflictError: Another command holds it.
        StorageFullError: The study's directory cannot be made.
    """
    directory = Path(study.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK_FILE).open("w")
    except OSError as error:
        raise StorageFullError(
            f"{directory} cannot be created: {error}; free space or set STEPTUNE_DATA_DIRECTORY"
        ) from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateConflictError(
                f"study {study.study_id} is running in another `steptune` command: stop that command with Ctrl-C first"
            ) from None
        yield


def delete_study(study: Study, store: SqlStudyStore, settings: Settings) -> None:
    """Delete a study with its trials, and everything measured in them.

    Raises:
        StateConflictError: A worker or a command runs it.
    """
    queue = StudyQueue(store.engine)
    queue.bury(study.study_id)
    with run_by_this_command(study):
        if version_of_study(store.engine, study.study_id) is not None:
            queue.delete(study.study_id)
        else:
            with writing(store.engine) as session:
                session.execute(delete(StudyRow).where(StudyRow.study_id == study.study_id))
    if Path(study.directory).is_relative_to((settings.data_directory / "studies").resolve()):
        shutil.rmtree(study.directory, ignore_errors=True)
    collect_garbage(store.engine, open_artifacts(settings), grace_s=settings.artifact_grace_s)
