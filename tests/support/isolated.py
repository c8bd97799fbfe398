"""Studies whose trials are isolated, where their level can be tried, with limits that are soon reached."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from trial_builders import Prepared, prepare

from steptune.service.isolation import Available, Level, Resources, SandboxRequest, level_named
from steptune.tuner.trials.study_files import StudyFiles

NEEDED = ("bubblewrap",)
"""Levels that can be tried wherever the project's own CI runs."""


def python_for(level: Level) -> str:
    """An interpreter that a level can run; skips where there is none.

    That of the tests may lie where only root can read. The system's can use the same packages.
    """
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    candidates = [sys.executable, *filter(None, [shutil.which(version, path="/usr/bin:/usr/local/bin")])]
    results = [level.probe(python) for python in candidates]
    for python, result in zip(candidates, results, strict=True):
        if isinstance(result, Available):
            return python
    reason = f"{level.name} cannot be used here: {results[0].reason}"
    if level.name in NEEDED and os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def few_resources(**changes: Any) -> Resources:
    few = {
        "num_tasks": 200,
        "disk_bytes": 96 << 20,
        "temporary_bytes": 64 << 20,
        "memory_bytes": 8 << 30,
        "memory_reserve_bytes": 256 << 20,
    }
    return Resources(**{**few, **changes})


def all_but(num_bytes: int) -> int:
    """A reserve of memory that is touched when this much more is in use."""
    return psutil.virtual_memory().available - num_bytes


@contextlib.contextmanager
def isolated_study(
    name: str,
    workload: str,
    *,
    resources: Resources | None = None,
    hidden: tuple[Path, ...] = (),
    owner: str | None = None,
    **options: Any,
) -> Iterator[Prepared]:
    """A study under a level, in a folder that an ordinary user may pass through."""
    level = level_named(name)
    with pytest.MonkeyPatch.context() as patch:
        packages = [path for path in sys.path if path.endswith("-packages")]
        patch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), *packages]).strip(os.pathsep))
        python = python_for(level)
        with tempfile.TemporaryDirectory(prefix="st-") as folder:
            Path(folder).chmod(0o755)
            directory = Path(folder) / "study"
            directory.mkdir()
            StudyFiles(directory).make_folders()
            request = SandboxRequest(
                study_directory=directory,
                workload=workload,
                python=python,
                resources=resources or few_resources(),
                hidden=hidden,
                owner=owner,
            )
            with level.sandbox(request) as sandbox:
                study = prepare(workload, directory, python=python, sandbox=sandbox, with_reference=False, **options)
                try:
                    yield study
                finally:
                    study.runner.close()
