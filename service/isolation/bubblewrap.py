"""Bubblewrap: a separate file system, processes and network for the trials of a study.

There are three ways. Started by root, bubblewrap makes the namespaces with root's rights and the server then becomes a
user of its own without any capability: no user namespace is involved, in which CUDA would not start (`cuInit` fails).
Started by anybody else, a user namespace is needed, which some systems forbid; a process that may change its user
starts bubblewrap as a separate user. In none of them can user code make a further user namespace (`confine.py`).

https://github.com/containers/bubblewrap
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from steptune.service.isolation.base import Level, SandboxRequest
from steptune.service.isolation.confine import confined, lacks
from steptune.service.isolation.devices import device_nodes, device_variables
from steptune.service.isolation.environment import USER, clean_environment
from steptune.service.isolation.fellows import fellows
from steptune.service.isolation.users import (
    SYS_ADMIN,
    become,
    can_change_user,
    has_capabilities,
    open_to_others,
    own_user,
)
from steptune.service.isolation.visible import interpreter_paths, system_paths, workload_paths
from steptune.tuner.errors import IsolationUnavailableError
from steptune.tuner.trials.memory_use import Taker
from steptune.tuner.trials.sandbox import Sandbox
from steptune.tuner.trials.study_files import StudyFiles

TEMPORARY = "/tmp"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables that make ranks of one machine connect over the loopback device: without a network, host names
do not resolve.
"""
_AS_ROOT = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP")


class Bubblewrap(Level):
    """The level `bubblewrap`: a private file system, no network, no other visible processes, no capabilities."""

    name = "bubblewrap"
    limits = "files, network, processes, memory, disk and the environment"

    @contextlib.contextmanager
    def sandbox(self, request: SandboxRequest) -> Iterator[Sandbox]:
        environment = clean_environment(os.environ) | ({} if request.network else LOOPBACK)
        environment |= device_variables(request.gpus)
        own, folder = workload_paths(request.workload, request.hidden)
        own = [*own, *request.readable]
        command = self._command(request, environment, own)
        # By the server's user: root without its capabilities may not enter what belongs to that one.
        enter = ("env", f"--chdir={folder or request.study_directory}", *confined(request.python))
        resources = request.resources.command()
        if not can_change_user():
            prefix = (*command, *_user_namespace(), "--", *resources, *enter)
            with fellows(request.owner, None) as others:
                yield self._sandbox(request, prefix, environment, others)
            return
        _check_readable([path for path in own if not path.is_relative_to(request.study_directory)])
        with own_user(request.study_directory) as uid, fellows(request.owner, None) as others:
            if has_capabilities(SYS_ADMIN) and os.geteuid() == 0:
                prefix = (*command, *_AS_ROOT, "--", *resources, *become(uid), *enter)
                yield self._sandbox(request, prefix, environment, others)
            else:
                prefix = (*become(uid), *command, *_user_namespace(), "--", *resources, *enter)
                yield self._sandbox(request, prefix, environment, others, as_user=become(uid))

    def separates(self) -> bool:
        return True

    def _sandbox(
        self,
        request: SandboxRequest,
        prefix: tuple[str, ...],
        environment: dict[str, str],
        others: Callable[[], Sequence[Taker]],
        as_user: tuple[str, ...] = (),
    ) -> Sandbox:
        return Sandbox(
            level=self.name,
            prefix=prefix,
            environment=environment,
            temporary=TEMPORARY,
            own_pids=True,
            as_user=as_user,
            quota=request.resources.quota,
            fellows=others,
        )

    def _command(self, request: SandboxRequest, environment: dict[str, str], own: Sequence[Path]) -> tuple[str, ...]:
        """Build bubblewrap's command. Later mounts cover earlier ones: the temporary file systems come first, the
        study's directory last.
        """
        shown = [
            *system_paths(network=request.network),
            *interpreter_paths(request.python, environment, request.hidden),
            *own,
        ]
        size = str(request.resources.temporary_bytes)
        study = request.study_directory
        return (
            *("bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", USER),
            *(() if request.network else ("--unshare-net",)),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"),
            *("--perms", "1777", "--size", size, "--tmpfs", TEMPORARY),
            *(argument for path in device_nodes(request.gpus) for argument in ("--dev-bind", str(path), str(path))),
            *_mounts(shown, study),
            *("--symlink", str(StudyFiles(study).compiler_headers), f"{TEMPORARY}/torchinductor_{USER}"),
            *("--remount-ro", "/", "--remount-ro", "/dev"),
        )

    def missing(self) -> str | None:
        if sys.platform != "linux":
            return "needs Linux"
        if shutil.which("bwrap") is None:
            return "bwrap not found: apt-get install bubblewrap"
        absent = [name for name in ("prlimit", "setpriv") if shutil.which(name) is None]
        return f"{' and '.join(absent)} not found: apt-get install util-linux" if absent else lacks()


def _check_readable(paths: Sequence[Path]) -> None:
    """Refuse, before anything is run, paths that the server's user can see but not read."""
    for path in paths:
        if not path.exists():
            raise IsolationUnavailableError(f"{path} does not exist: correct STEPTUNE_READABLE")
        if not open_to_others(path):
            raise IsolationUnavailableError(
                f"trials run as a separate user, who cannot read {path}: open it to that user (chmod o+rX {path})"
            )


def _mounts(shown: Sequence[Path], study: Path) -> Iterator[str]:
    """Yield bubblewrap's options for the mounts, parents before their contents; folders above a mount are accessible to
    all users.
    """
    made = {Path("/"), Path("/dev"), Path("/proc"), Path(TEMPORARY)}
    mounted: list[Path] = []
    for path in [*sorted(set(shown), key=lambda place: len(place.parts)), study]:
        if path != study and any(path.is_relative_to(place) for place in mounted):
            continue
        for folder in reversed(path.parents):
            if folder not in made and not any(folder.is_relative_to(place) for place in mounted):
                made.add(folder)
                yield from ("--perms", "0755", "--dir", str(folder))
        yield from ("--bind" if path == study else "--ro-bind", str(path), str(path))
        mounted.append(path)


@functools.cache
def _user_namespace() -> tuple[str, ...]:
    """Return the options for a user namespace. Bubblewrap 0.8 and later also forbid further user namespaces in it."""
    known = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False).stdout
    return ("--unshare-user", *(("--disable-userns",) if "--disable-userns" in known else ()), "--cap-drop", "ALL")
