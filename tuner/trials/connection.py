"""Connection to a trial server, on the side of the parent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from steptune.tuner.errors import RunnerError
from steptune.tuner.installation import IMPORT_ROOT
from steptune.tuner.trials.launch import SECRET_VARIABLE
from steptune.tuner.trials.messages import Channel, Exit, FromServer, MessageTooLargeError, ServerReady, decoder_of
from steptune.tuner.trials.sandbox import Sandbox
from steptune.tuner.trials.scratch import Scratch
from steptune.tuner.trials.untrusted import open_below

READY_TIMEOUT_S = 120.0
NO_SANDBOX = Sandbox()
CLOSE_TIMEOUT_S = 5.0
TAIL_BYTES = 8192


class ServerConnection:
    """Trial server started in a given interpreter, with the connection to it.

    Args:
        python: The user's interpreter.
        variables: Environment variables beside the inherited ones.
        preload: Modules to import before forking.
        imports: File with the names of further modules; it may be missing.
        sandbox: Sandbox around the server.
    """

    def __init__(
        self,
        *,
        python: str,
        variables: Mapping[str, str],
        preload: Sequence[str],
        imports: Path,
        log: Path,
        start_method: str = "fork",
        sandbox: Sandbox = NO_SANDBOX,
    ) -> None:
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = Scratch((sandbox.environment or {}).get("USER"))
        command = [
            *sandbox.prefix,
            python,
            "-m",
            "steptune.tuner.trials.server",
            str(theirs.fileno()),
            # A parent outside of its process namespace has no number there; the closed connection tells of its end.
            "0" if sandbox.own_pids else str(os.getpid()),
            "--log",
            str(log),
            "--imports",
            str(imports),
            "--start-method",
            start_method,
            *(() if sandbox.temporary else ("--scratch", str(self._scratch.path))),
            *(("--alone",) if sandbox.alone else ()),
            "--preload",
            *preload,
        ]
        if sandbox.uid is not None:
            self._scratch.give_to(sandbox.uid, sandbox.headers)
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), self._scratch.fileno()),
            env=server_environment(sandbox, self._scratch.path) | dict(variables),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(ours)
        self._log = log
        self._decoder = decoder_of(FromServer)
        self._wait_until_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def temporary(self) -> Path:
        return self._scratch.path

    def fileno(self) -> int:
        return self.channel.fileno()

    def send(self, message: Any) -> None:
        try:
            self.channel.send(message)
        except OSError as error:
            # It has closed its end, and is about to end: who asks shall find it so.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_TIMEOUT_S)
            raise RunnerError(f"the connection to the trial server broke: {error}; see its log {self._log}") from None

    def take_messages(self) -> list[FromServer]:
        """Return the messages that have arrived; call when the descriptor is readable.

        Raises:
            RunnerError: The server has ended, or has sent a malformed message.
        """
        try:
            alive = self.channel.read_available()
            messages = [self._decoder.decode(line) for line in self.channel.take_messages()]
        except (MessageTooLargeError, msgspec.DecodeError) as error:
            raise RunnerError(
                f"received a malformed message from the trial server: {error}; see its log {self._log}"
            ) from None
        if not alive and not messages:
            status = self._process.wait(timeout=CLOSE_TIMEOUT_S)
            raise RunnerError(f"the trial server exited with status {status}; see its log {self._log}")
        return messages

    def close(self) -> None:
        """End the server and all of its descendants."""
        with contextlib.suppress(OSError):
            self.channel.send(Exit())
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for end in (None, signal.SIGTERM, signal.SIGKILL):
            if end is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(end)
            try:
                self._process.wait(timeout=max(0.5, deadline - time.monotonic()))
                break
            except subprocess.TimeoutExpired:
                continue
        self.channel.close()
        self._scratch.close()

    def _wait_until_ready(self) -> None:
        if not self._is_ready():
            self._process.kill()
            status = self._process.wait()
            self.channel.close()
            self._scratch.close()
            tail = _tail(self._log)
            raise RunnerError(
                f"the trial server did not start (exit status {status}). The last lines of {self._log}:\n{tail}"
            )

    def _is_ready(self) -> bool:
        try:
            line = self.channel.receive(READY_TIMEOUT_S)
            return line is not None and isinstance(self._decoder.decode(line), ServerReady)
        except (MessageTooLargeError, msgspec.DecodeError):
            return False


def server_environment(sandbox: Sandbox, scratch: Path) -> dict[str, str]:
    """Return the environment of a server, without the variables of the trials."""
    inherited = dict(os.environ if sandbox.environment is None else sandbox.environment)
    inherited.pop(SECRET_VARIABLE, None)
    temporary = sandbox.temporary or str(scratch)
    inherited["PYTHONPATH"] = os.pathsep.join(p for p in (str(IMPORT_ROOT), inherited.get("PYTHONPATH", "")) if p)
    inherited["TMPDIR"] = temporary
    if sandbox.environment is not None:
        inherited["HOME"] = temporary
    return inherited


def _tail(path: Path, lines: int = 8) -> str:
    """Return the last lines of a log. If user code replaced the log by a link, do not follow the link."""
    with contextlib.suppress(OSError), open_below(path.parent.parent, path) as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
        return "\n".join(log.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()[-lines:])
    return ""


def default_start_method() -> str:
    """Return "fork" on Linux, else "spawn": on other systems, a process that has loaded torch cannot be forked
    safely.
    """
    return "fork" if sys.platform == "linux" else "spawn"
