"""The parent's end of a trial server."""

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

from tuner.errors import RunnerError
from tuner.trials.messages import Channel, Exit, FromServer, ServerReady, decoder_of
from tuner.trials.scratch import Scratch

READY_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 5.0


class ServerConnection:
    """Starts a trial server in an interpreter and talks to it.

    Args:
        python: The user's interpreter.
        variables: Environment variables beside the inherited ones.
        preload: Modules to import before forking.
        prefix: Command that wraps the server (a sandbox).
    """

    def __init__(
        self,
        *,
        python: str,
        variables: Mapping[str, str],
        preload: Sequence[str],
        log: Path,
        start_method: str = "fork",
        prefix: Sequence[str] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = Scratch()
        command = [
            *prefix,
            python,
            "-m",
            "tuner.trials.server",
            str(theirs.fileno()),
            str(os.getpid()),
            "--log",
            str(log),
            "--start-method",
            start_method,
            "--scratch",
            str(self._scratch.path),
            "--preload",
            *preload,
        ]
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), self._scratch.fileno()),
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(self._scratch.path), **variables},
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

    def fileno(self) -> int:
        return self.channel.fileno()

    def send(self, message: Any) -> None:
        try:
            self.channel.send(message)
        except OSError as error:
            raise RunnerError(f"the trial server is gone: {error}; its log is {self._log}") from None

    def take_messages(self) -> list[FromServer]:
        """What has arrived; call when the descriptor is readable.

        Raises:
            RunnerError: The server has ended.
        """
        alive = self.channel.read_available()
        messages = [self._decoder.decode(line) for line in self.channel.take_messages()]
        if not alive and not messages:
            status = self._process.wait(timeout=CLOSE_TIMEOUT_S)
            raise RunnerError(f"the trial server ended with status {status}; its log is {self._log}")
        return messages

    def close(self) -> None:
        """Ends the server and everything below it."""
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
        line = self.channel.receive(READY_TIMEOUT_S)
        if line is None or not isinstance(self._decoder.decode(line), ServerReady):
            self._process.kill()
            status = self._process.wait()
            self.channel.close()
            self._scratch.close()
            tail = _tail(self._log)
            raise RunnerError(f"the trial server did not start (status {status}); the end of {self._log}:\n{tail}")


def _tail(path: Path, lines: int = 8) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    return ""


def default_start_method() -> str:
    """ "fork" on Linux; elsewhere a process that has torch loaded cannot be forked safely."""
    return "fork" if sys.platform == "linux" else "spawn"
