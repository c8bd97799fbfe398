"""Runners for commands and workers: the engine's local runner, at the requested level of isolation."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from steptune.service.isolation import NONE, STRONGEST, Level, Resources, SandboxRequest, choose
from steptune.service.isolation.devices import visible_gpus
from steptune.service.places import VISIBLE_DEVICES
from steptune.service.settings import Settings
from steptune.tuner.errors import StorageFullError
from steptune.tuner.trials.runner import LocalRunner
from steptune.tuner.trials.study_files import StudyFiles

AT_HOME = NONE
"""Isolation level of commands that a user types: code, machine and files are the user's own."""


def chosen_level(settings: Settings, *, python: str | None = None) -> Level:
    """Return the isolation level of the settings, for the user's own code.

    Raises:
        ChoiceError: There is no such level.
        IsolationUnavailableError: The named level cannot be used here.
    """
    return choose(settings.isolation or AT_HOME, python or sys.executable)


def worker_level(settings: Settings, *, python: str | None = None) -> Level:
    """Return the isolation level for code that others submitted. If the service authenticates users, the level
    separates them from the worker and from each other, unless the settings say "none".

    Raises:
        ChoiceError: There is no such level.
        IsolationUnavailableError: The named level cannot be used here, or no level can.
    """
    return choose(settings.isolation or STRONGEST, python or sys.executable, separating=not settings.insecure_no_auth)


@contextlib.contextmanager
def isolated_runner(
    *,
    workload: str,
    directory: Path,
    settings: Settings,
    level: Level,
    python: str | None = None,
    owner: str | None = None,
    **options: Any,
) -> Iterator[LocalRunner]:
    """Open a runner of trials under an isolation level; at the end, close it and leave none of its processes.

    Args:
        owner: The user who submitted the study.
        options: Options of the `LocalRunner`.

    Raises:
        StorageFullError: The directory cannot be made.
        IsolationUnavailableError: The workload cannot be run under this level.
    """
    directory = directory.absolute()
    python = python or sys.executable
    try:
        directory.mkdir(parents=True, exist_ok=True)
        StudyFiles(directory).make_folders()
        resources = Resources.of_this_machine(directory, settings.study_disk_bytes, settings.study_memory_bytes)
    except OSError as error:
        raise StorageFullError(
            f"{directory} cannot be created: {error}; free space or set STEPTUNE_DATA_DIRECTORY"
        ) from None
    request = SandboxRequest(
        study_directory=directory,
        workload=workload,
        python=python,
        resources=resources,
        network=settings.isolation_network,
        readable=tuple(path.absolute() for path in settings.readable),
        gpus=visible_gpus(os.environ.get(VISIBLE_DEVICES)),
        hidden=own_files(settings),
        owner=owner,
    )
    with level.sandbox(request) as sandbox:
        runner = LocalRunner(workload=workload, directory=directory, python=python, sandbox=sandbox, **options)
        try:
            yield runner
        finally:
            runner.close()


def own_files(settings: Settings) -> tuple[Path, ...]:
    """Return the paths of files that belong to the service and never to a workload: database, studies, settings."""
    url = make_url(settings.database_url)
    database = [Path(url.database)] if url.get_backend_name() == "sqlite" and url.database else []
    return tuple(path.absolute() for path in (*database, settings.data_directory, Path(".env")))
