"""Limits: an ordinary user, resource limits, and an environment without secrets. It needs only util-linux.

What a process may take is bounded; what it may see is bounded only by the permissions of files. The network is open.
Started by root, or with the capabilities that change a user, trials get a user of their own, so that they reach no
other process and no private file. Started by anybody else they stay that user, who can read all that is theirs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import psutil

from steptune.service.isolation.base import Level, SandboxRequest
from steptune.service.isolation.confine import confined, lacks
from steptune.service.isolation.environment import clean_environment
from steptune.service.isolation.fellows import fellows
from steptune.service.isolation.users import (
    SYS_ADMIN,
    become,
    can_change_user,
    closed_to_others,
    has_capabilities,
    own_user,
    remove_left,
)
from steptune.service.isolation.visible import interpreter_paths
from steptune.tuner.errors import IsolationUnavailableError
from steptune.tuner.installation import trial_folders
from steptune.tuner.trials.sandbox import Sandbox
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.workloads.reference import parse_reference


class Limits(Level):
    """Resource limits and, if root starts the trials, a separate user for them."""

    name = "limits"
    limits = (
        "processes, memory, disk and the environment; trials can access the network, and all files that are open to "
        "any user"
    )

    @contextlib.contextmanager
    def sandbox(self, request: SandboxRequest) -> Iterator[Sandbox]:
        environment = clean_environment(os.environ)
        headers = StudyFiles(request.study_directory).compiler_headers
        resources, inner = request.resources, confined(request.python)
        if not can_change_user():
            prefix = (*resources.command(num_others=_tasks_of(os.geteuid())), *_NO_NEW_PRIVILEGES, *inner)
            with fellows(request.owner, None) as others:
                yield Sandbox(
                    level=self.name, prefix=prefix, environment=environment, quota=resources.quota, fellows=others
                )
            return
        _check_reachable(request, environment)
        with own_user(request.study_directory) as uid, fellows(request.owner, uid) as others:
            yield Sandbox(
                level=self.name,
                prefix=(*_hiding_processes(), *resources.command(), *become(uid), *inner),
                environment=environment,
                uid=uid,
                as_user=become(uid),
                headers=headers,
                tidy=lambda kept: remove_left(uid, kept=kept, deep=False),
                quota=resources.quota,
                fellows=others,
            )

    def separates(self) -> bool:
        return can_change_user()

    def missing(self) -> str | None:
        if sys.platform != "linux":
            return "needs Linux"
        absent = [name for name in ("prlimit", "setpriv") if shutil.which(name) is None]
        return f"{' and '.join(absent)} not found: apt-get install util-linux" if absent else lacks()


_NO_NEW_PRIVILEGES = ("setpriv", "--no-new-privs", "--")
_HIDE = ("unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-c")


@functools.cache
def _hiding_processes() -> tuple[str, ...]:
    """Return a command prefix that hides the processes of other users; empty where this process may not mount.

    Elsewhere (in most containers) it sees command lines of others, but neither their environment nor their memory.
    """
    command = (*_HIDE, 'mount -t proc -o nosuid,nodev,noexec,hidepid=2 proc /proc && exec "$@"', "sh")
    works = has_capabilities(SYS_ADMIN) and subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if works and works.returncode == 0 else ()


def _tasks_of(uid: int) -> int:
    """Count the threads of a user: the limit on tasks applies to all of them, not only to the study's threads."""
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == uid:
                count += process.num_threads()
    return count


def _check_reachable(request: SandboxRequest, environment: dict[str, str]) -> None:
    """Refuse, before anything is run, paths that an ordinary user cannot read."""
    paths = [*trial_folders(), *interpreter_paths(request.python, environment, ()), request.study_directory]
    reference = parse_reference(request.workload)
    if reference.kind == "file" and not reference.path.is_relative_to(request.study_directory):
        paths.append(reference.path)
    for path in paths:
        closed = closed_to_others(path)
        if closed is not None and closed != request.study_directory:
            raise IsolationUnavailableError(
                f"trials run as a separate user, who cannot read {path} because {closed} is closed to other "
                f"users. Use bubblewrap, or move the files out of {closed}, to /opt or /srv"
            )
