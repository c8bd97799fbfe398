"""Limits: an ordinary user, resource limits, and an environment without secrets. Needs nothing but util-linux.

What a process may take is bounded; what it may see is bounded only by the permissions of files. The network is open.
Started by root, trials get a user of their own, so that they reach no other process and no private file. Started by
anybody else they stay that user, who can read all that is theirs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator

import psutil

from steptune.service.isolation.base import Level, SandboxRequest
from steptune.service.isolation.environment import clean_environment
from steptune.service.isolation.users import become, closed_to_others, give, own_user
from steptune.service.isolation.visible import interpreter_paths
from steptune.tuner.errors import IsolationUnavailable
from steptune.tuner.installation import trial_folders
from steptune.tuner.trials.sandbox import Sandbox
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.workloads.reference import parse_reference


class Limits(Level):
    """Resource limits and, where root starts the trials, a user of their own."""

    name = "limits"
    limits = "processes, memory, disk and the environment; files and the network are those of an ordinary user"

    @contextlib.contextmanager
    def sandbox(self, request: SandboxRequest) -> Iterator[Sandbox]:
        environment = clean_environment(os.environ)
        headers = StudyFiles(request.study_directory).compiler_headers
        resources = request.resources
        if os.geteuid() != 0:
            prefix = (*resources.command(num_others=_tasks_of(os.geteuid())), *_NO_NEW_PRIVILEGES)
            yield Sandbox(level=self.name, prefix=prefix, environment=environment, quota=resources.quota)
            return
        _check_reachable(request, environment)
        with own_user() as uid:
            give(request.study_directory, uid)
            yield Sandbox(
                level=self.name,
                prefix=(*resources.command(), *become(uid)),
                environment=environment,
                uid=uid,
                headers=headers,
                quota=resources.quota,
            )

    def missing(self) -> str | None:
        if sys.platform != "linux":
            return "needs Linux"
        absent = [name for name in ("prlimit", "setpriv") if shutil.which(name) is None]
        return f"{' and '.join(absent)} not found: apt-get install util-linux" if absent else None


_NO_NEW_PRIVILEGES = ("setpriv", "--no-new-privs", "--")


def _tasks_of(uid: int) -> int:
    """Threads of a user: the limit counts all of them, not only those of the study."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == uid:
                count += process.num_threads()
    return count


def _check_reachable(request: SandboxRequest, environment: dict[str, str]) -> None:
    """Refuses, before anything is run, what an ordinary user cannot read."""
    paths = [*trial_folders(), *interpreter_paths(request.python, environment, ()), request.study_directory]
    reference = parse_reference(request.workload)
    if reference.kind == "file":
        paths.append(reference.path)
    for path in paths:
        closed = closed_to_others(path)
        if closed is not None and closed != request.study_directory:
            raise IsolationUnavailable(
                f"trials run as a user of their own, who cannot read {path} because {closed} is closed to other users. "
                "Use bubblewrap, or move the files outside of it, to /opt or /srv"
            )
