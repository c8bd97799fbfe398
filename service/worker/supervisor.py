"""Supervisor of a worker beside a server: a child process that is restarted when it ends, and ends with its parent."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from pydantic_core import to_json

from steptune.service.settings import Settings, is_secret

logger = logging.getLogger("steptune.supervisor")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
SETTLED_S = 60.0
"""Minimum run time, in seconds, after which an ended worker is restarted at once."""


class Supervisor:
    """Supervisor that keeps one worker running, from `start` to `stop`.

    Args:
        arguments: Further arguments of `steptune worker`.
    """

    def __init__(self, settings: Settings, arguments: Sequence[str] = ()) -> None:
        own = ["--supervised-by", str(os.getpid())]
        self._command = [sys.executable, "-m", "steptune", "worker", *own, *arguments]
        self._environment = {**_inherited(), **_variables(settings)}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        # The kernel tells a child of its parent's death when the thread that started it ends: this one never does.
        self._thread = threading.Thread(target=self._keep_running, name="supervisor", daemon=True)

    @property
    def pid(self) -> int | None:
        """Return the id of the worker's process; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the worker. Its running trials may take `timeout_s` seconds; then the worker returns its study to the
        queue.
        """
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is None:
            return
        for number, patience_s in ((signal.SIGTERM, timeout_s), (signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
            if process.poll() is None:
                process.send_signal(number)
            try:
                process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                continue
        self._thread.join(LONGEST_PAUSE_S)

    def _keep_running(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began_s = time.monotonic()
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = subprocess.Popen(self._command, env=self._environment, stdin=subprocess.DEVNULL)
            status = self._process.wait()
            if self._stopping.is_set():
                return
            if time.monotonic() - began_s > SETTLED_S:
                pause_s = FIRST_PAUSE_S
            logger.warning("the worker ended with status %d: a new one starts in %g s", status, pause_s)
            self._stopping.wait(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


def _inherited() -> dict[str, str]:
    """Return the environment, without variables that belong to the server alone."""
    of_the_server = {f"STEPTUNE_{name.upper()}" for name in _servers_own()}
    return {name: value for name, value in os.environ.items() if name.upper() not in of_the_server}


def _servers_own() -> set[str]:
    """Return the names of secret settings, and of settings that need a secret. A worker needs only the database's
    secret.
    """
    return {"proxy_user_header", *filter(is_secret, Settings.model_fields)}


def _variables(settings: Settings) -> dict[str, str]:
    """Return the settings as environment variables; settings of the server alone are empty, whatever `.env` has."""
    variables = {f"STEPTUNE_{name.upper()}": "" for name in _servers_own()}
    for name in settings.model_fields_set - _servers_own():
        value = getattr(settings, name)
        if value is not None:
            text = to_json(value).decode() if not isinstance(value, str) else value
            variables[f"STEPTUNE_{name.upper()}"] = text.strip('"')
    return variables
