"""Base classes of isolation levels: each has a probe, and a sandbox for one study."""

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
"""Exit status of a probe that found no device: the value of CUDA_ERROR_NO_DEVICE, CUDA's own error code."""
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
    """Result of a probe: the level can be used here."""


@dataclass(frozen=True)
class Unavailable:
    """Result of a probe: the level cannot be used here. `reason` says why, and what would change that."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class SandboxRequest:
    """Request for a sandbox: the study, its files and its limits.

    Attributes:
        study_directory: The only directory where trials may write.
        workload: Reference of the workload.
        python: The interpreter of the trials.
        resources: Limits of the trials' resources.
        network: Whether trials may use the network; they may always use loopback.
        readable: Files and folders that the workload reads beside its own, mainly datasets.
        gpus: NVIDIA GPUs that trials may use, numbered in the order of the PCI bus; None for all.
        hidden: Files to hide, which are the service's own: the database, other studies.
        owner: The user who submitted the study; None where there is none.
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
    """Description, in one line, of what the level keeps from user code."""

    @abc.abstractmethod
    def sandbox(self, request: SandboxRequest) -> contextlib.AbstractContextManager[Sandbox]:
        """Open a sandbox for one study; closing it ends all of its processes.

        Raises:
            IsolationUnavailableError: This study cannot be run so: a file that it needs is out of its reach.
        """

    @abc.abstractmethod
    def separates(self) -> bool:
        """Say whether this level separates trials from this process, its files and other studies: by a separate user,
        or by a separate file system and separate process numbers.
        """

    @abc.abstractmethod
    def missing(self) -> str | None:
        """Say what the machine lacks for this level, and how to add it; None where it lacks nothing. Other obstacles
        are found only by a probe.
        """

    def probe(self, python: str = sys.executable) -> Available | Unavailable:
        """Try the level out; the result is cached in the process."""
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
    """Return the source code of the probe, which writes to a directory and initialises CUDA where there are devices."""
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
                done.stderr = "CUDA finds a device outside this sandbox, but none inside"
    except IsolationUnavailableError as error:
        return Unavailable(str(error))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unavailable(f"{level.name} does not work here: {error}")
    if done.returncode == 0:
        return Available()
    said = done.stderr.strip().rpartition("\n")[2] or f"status {done.returncode}"
    return Unavailable(f"a test process under this level failed: {said}")


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
