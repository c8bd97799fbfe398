"""Process between `steptune` and the command of a script. It makes the command's copy-on-write view of the folder, and
leaves no process behind.

All processes that the command starts and abandons are adopted, and killed when the command has ended, when its ranks
have been recorded, when this process is told to end, or when its parent dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from steptune.tuner.scripts.record import COMPLETE, NO_VIEW, STATUS, TEXTS
from steptune.tuner.scripts.view import ViewError, enter_view
from steptune.tuner.trials.processes import become_subreaper, die_with_parent, kill_descendants

END_S = 3.0
"""Seconds that a command may continue after its recording has ended, or after an interrupt, before it is killed."""
POLL_S = 0.05
KEPT_POLL_S = 0.2
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit statuses of shells for a command that does not exist or cannot be executed."""


class _Stop:
    """Flag that is set when this process is told to end. A terminal interrupt also reaches the command directly."""

    def __init__(self) -> None:
        self.told = False
        self.interrupted = False
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._interrupt)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.told = True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True


def supervise(
    record: Path,
    parent_pid: int,
    view: Path | None,
    variables: Mapping[str, str],
    command: list[str],
    *,
    keeps_copies: bool = False,
) -> int:
    """Run the command to its end, and return its exit status as in a shell, or 0 if it was recorded.

    Args:
        record: Folder of the record.
        keeps_copies: Whether frozen copies of a recorded command live until this process is told to end.
        view: Empty folder for what the command writes; None to write in the folder itself.
        variables: Environment variables of the command, in addition to this process's.
    """
    stop = _Stop()
    become_subreaper()
    if view is not None:
        try:
            enter_view(Path.cwd(), view)
            for name, text in json.loads((record / TEXTS).read_text(encoding="utf-8")).items():
                Path(name).write_text(text, encoding="utf-8")
        except ViewError as error:
            (record / NO_VIEW).write_text(str(error), encoding="utf-8")
            return 1
    die_with_parent(parent_pid, signal.SIGTERM)
    try:
        process = subprocess.Popen(command, env={**os.environ, **variables})
    except FileNotFoundError:
        sys.stderr.write(f"{command[0]}: command not found\n")
        return NOT_FOUND
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return NOT_EXECUTABLE
    try:
        status = _wait(process, stop, record / COMPLETE)
        if keeps_copies and (record / COMPLETE).exists():
            _keep_copies(record, stop)
        return status
    finally:
        kill_descendants()
        if os.getppid() != parent_pid:  # nobody is left to tidy up
            shutil.rmtree(record.parent, ignore_errors=True)


def _keep_copies(record: Path, stop: _Stop) -> None:
    partial = record / f".{STATUS}"
    partial.write_text("0", encoding="ascii")
    partial.rename(record / STATUS)
    while not (stop.told or stop.interrupted):
        time.sleep(KEPT_POLL_S)


def _wait(process: subprocess.Popen[bytes], stop: _Stop, complete: Path) -> int:
    end_s: float | None = None
    while process.poll() is None:
        if end_s is None and stop.told and not stop.interrupted:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        if end_s is None and (stop.told or stop.interrupted or complete.exists()):
            end_s = time.monotonic() + END_S
        if end_s is not None and time.monotonic() > end_s:
            return 0 if complete.exists() else 128 + signal.SIGKILL
        time.sleep(POLL_S)
    if complete.exists():
        return 0
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
