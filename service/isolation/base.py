"""Base of every isolation level: a probe, and a sandbox for one study."""

from __future__ import annotations

import abc
import contextlib
import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from steptune.service.isolation.resources import Resources
from steptune.tuner.errors import IsolationUnavailableError
from steptune.tuner.trials.connection import server_environment
from steptune.tuner.trials.sandbox import Sandbox
from steptune.tuner.trials.scratch import scratch_directory

PROBE_TIMEOUT_S = 60
NO_DEVICE = 100
"""Answer of CUDA that there is no device, CUDA_ERROR_NO_DEVICE, and the status of a probe that got it."""
_BEGIN_CUDA = f"""
import ctypes, os
if os.path.exists("/dev/nvidiactl"):
    try:
        code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError:  # no library, and so no device for anybody
        code = {NO_DEVICE}
    if code == {NO_DEVICE}:
        raise SystemExit({NO_DEVICE})
    if code:
        raise SystemExit(f"cuInit returns {{code}}: the device cannot be used in this sandbox")
"""
_PROBE = """
import os, socket, tempfile
import steptune.tuner.trials.messages
with tempfile.TemporaryFile() as file:
    file.write(b"x")
with open(os.path.join({directory!r}, "probe"), "w") as file:
    file.write("x")
"""


@dataclass(frozen=True)
class Available:
    """The level can be used here."""


@dataclass(frozen=True)
class Unavailable:
    """The level cannot be used here. `reason` says why, and what would change that."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class SandboxRequest:
    """Purpose of a sandbox.

    Attributes:
        study_directory: Where trials may write; nowhere else.
        workload: Reference of the workload.
        python: The interpreter of the trials.
        resources: What they may take.
        network: Whether they may use it; loopback they always may.
        readable: Files and folders that the workload reads beside its own, datasets above all.
        gpus: NVIDIA's that they have, by their numbers in the order of the PCI bus; None for all.
        hidden: The service's own files: the database, other studies.
        owner: Who submitted the study; None is nobody.
    """

    study_directory: Path
    workload: str
    python: str
    resources: Resources
    network: bool = False
    readable: tuple[Path, ...] = ()
    gpus: tuple[int, ...] | None = None
    hidden: tuple[Path, ...] = ()
    owner: str | None = None


class Level(abc.ABC):
    """One isolation level."""

    name: ClassVar[str]
    limits: ClassVar[str]
    """Description, in a line, of what it keeps user code from."""

    @abc.abstractmethod
    def sandbox(self, request: SandboxRequest) -> contextlib.AbstractContextManager[Sandbox]:
        """A sandbox for one study; what runs in it is gone at the end.

        Raises:
            IsolationUnavailableError: This study cannot be run so: a file that it needs is out of its reach.
        """

    @abc.abstractmethod
    def separates(self) -> bool:
        """Say whether trials of this process would reach neither its files nor its processes, nor those of other
        studies: they have a user, or a file system and process numbers, of their own.
        """

    @abc.abstractmethod
    def missing(self) -> str | None:
        """Parts that the machine lacks as far as looking tells, with the way out."""

    def probe(self, python: str = sys.executable) -> Available | Unavailable:
        """Try the level out, once in a process."""
        return _probe(self, python)


@functools.cache
def _probe(level: Level, python: str) -> Available | Unavailable:
    missing = level.missing()
    if missing is not None:
        return Unavailable(missing)
    with scratch_directory() as folder:
        directory = folder / "study"
        directory.mkdir()
        request = SandboxRequest(
            study_directory=directory,
            workload="zoo:synthetic",
            python=python,
            resources=Resources.of_this_machine(directory),
        )
        return _try(level, request)


def probe_code(directory: Path) -> str:
    """Program of the probe, which writes to a directory and begins CUDA where there are devices."""
    return _PROBE.format(directory=str(directory)) + _BEGIN_CUDA


def _try(level: Level, request: SandboxRequest) -> Available | Unavailable:
    try:
        with level.sandbox(request) as sandbox:
            temporary = Path(sandbox.temporary or request.study_directory)
            environment = server_environment(sandbox, temporary)
            done = _run([*sandbox.prefix, request.python, "-c", probe_code(request.study_directory)], environment)
            if done.returncode == NO_DEVICE:
                outside = _run([request.python, "-c", _BEGIN_CUDA], environment)
                if outside.returncode == NO_DEVICE:  # whatever hides the devices, it is not this level
                    return Available()
                done.stderr = "CUDA finds no device in this sandbox, and does outside it"
    except IsolationUnavailableError as error:
        return Unavailable(str(error))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unavailable(f"{level.name} does not work here: {error}")
    if done.returncode == 0:
        return Available()
    said = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
    return Unavailable(f"a process under it fails: {said}")


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PROBE_TIMEOUT_S,
        check=False,
    )
