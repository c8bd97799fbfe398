"""Trials of a script that start from a frozen copy of its process (`agent/copies.py`).

A copy has already imported modules, read data and built models, so that each trial takes only the time of the rest. It
shares the inspection's copy-on-write view of the folder, and writes the record of its trial beside the inspection's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from steptune.tuner.errors import SteptuneError
from steptune.tuner.scripts.launch import Ended, ended_in
from steptune.tuner.scripts.record import SETTINGS, STATUS, CopyPlace, ScriptRecord

REQUEST, PID, REFUSED = "request", "pid", "refused"
"""Names of the files by which Steptune and a frozen process communicate, as the hooks define them."""
POLL_S = 0.02
CHECK_EVERY_S = 0.5
END_S = 5.0
"""Maximum number of seconds until a frozen process notices that its trial was killed."""
USED_BY_EVERY_TRIAL = ("torch._dynamo",)
"""Modules that every frozen process imports before it starts a trial: optimizers need them, and importing them takes
seconds.
"""
USED_TO_COMPILE = ("torch._inductor.compile_fx",)


class CopyError(SteptuneError):
    """Error for a frozen copy of the script's process that cannot start a trial, with the reason. Trials then run the
    script's command from the beginning instead.
    """


def place_to_start_from(record: ScriptRecord) -> CopyPlace:
    """Return the last frozen copy made before the training loader is first iterated; a trial makes all its changes
    after that point.

    Raises:
        CopyError: There is no such copy.
    """
    loader = record.training_loader
    places = list(record.copies)
    for position, place in enumerate(places):
        if loader is not None and (place.what, place.number) == ("loader", loader.number):
            places = places[: position + 1]
            break
    found = next((place for place in reversed(places) if place.copy), None)
    if found is None:
        reasons = [place.reason for place in places]
        raise CopyError(reasons[0] if reasons else "the script never reached a point where training may begin")
    return found


class FrozenCopy:
    """Frozen copy of a script's process, from which the script's trials start.

    Args:
        folder: Folder of the inspection's record.
        record: Record of the process that left copies.
        began_ns: Time at which the inspection began.
        view: The folder where the script runs.

    Attributes:
        spared_ns: Time that the command takes from its start to this place.

    Raises:
        CopyError: There is no usable copy.
    """

    def __init__(self, folder: Path, record: ScriptRecord, began_ns: int, view: Path) -> None:
        chosen = place_to_start_from(record)
        self._folder = folder
        self._view = view.resolve()
        self._copy = folder / chosen.copy
        self.spared_ns = chosen.at_ns - began_ns
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        for place in record.copies:
            if place.copy and place.copy != self._copy.name:
                _kill(_pid(folder / place.copy))
        compiles = USED_TO_COMPILE if record.notes.get("compiled") else ()
        self._send({"imports": [*USED_BY_EVERY_TRIAL, *compiles]}, END_S)

    def shared(self, folder: Path) -> Path:
        """Copy a folder to where the frozen process can read it, and return the new path. Files written after the
        process was frozen may be hidden from it.
        """
        target = self._folder / f"shared-{folder.name}"
        if not target.exists():
            shutil.copytree(folder, target)
        return target

    @contextlib.contextmanager
    def ran(
        self, trial: Mapping[str, Any], log: Path, longest_s: float | None, check: Callable[[], None] | None
    ) -> Iterator[Ended]:
        """Run a trial that starts from the frozen process; the trial's files exist until the context ends. Several
        threads may run trials at once.

        Raises:
            CopyError: The copy cannot start it.
        """
        folder = self._folder / f"trial-{next(self._numbers)}"
        folder.mkdir()
        (folder / SETTINGS).write_text(json.dumps({"full": False, "trial": dict(trial)}), encoding="utf-8")
        own_log = folder / "log"
        own_log.touch()
        began = time.monotonic()
        try:
            request = {"trial": dict(trial), "folder": str(folder), "log": str(own_log), "view": str(self._view)}
            self._send(request, longest_s)
            with own_log.open("rb") as source, log.open("ab", buffering=0) as target:
                status = self._status(folder, began, longest_s, check, lambda: shutil.copyfileobj(source, target))
            yield replace(ended_in(folder, status), forked=True)
        finally:
            shutil.rmtree(folder)

    def _status(
        self,
        folder: Path,
        began: float,
        longest_s: float | None,
        check: Callable[[], None] | None,
        copy_log: Callable[[], None],
    ) -> int | None:
        """Return the exit status of a trial; None if it exceeded its time limit."""
        status, checked = folder / STATUS, began
        try:
            while not status.exists():
                time.sleep(POLL_S)
                if time.monotonic() - checked > CHECK_EVERY_S:
                    checked = time.monotonic()
                    copy_log()
                    if check is not None:
                        check()
                    if not _lives(_pid(self._copy)):
                        raise CopyError("the frozen copy has ended")
                if longest_s is not None and time.monotonic() - began > longest_s:
                    self._end(folder)
                    return None
            return int(status.read_text(encoding="ascii"))
        except BaseException:
            self._end(folder)
            raise
        finally:
            copy_log()

    def _end(self, folder: Path) -> None:
        """Kill a trial, and wait until the frozen process has ended all processes that the trial left."""
        with contextlib.suppress(OSError):
            _kill(_pid(folder))
        end_s = time.monotonic() + END_S
        while not (folder / STATUS).exists() and time.monotonic() < end_s:
            time.sleep(POLL_S)

    def _send(self, request: Mapping[str, Any], longest_s: float | None) -> None:
        """Write a request to the frozen process's pipe, which opens once that process waits for requests."""
        end_s = None if longest_s is None else time.monotonic() + longest_s
        while True:
            refused = self._copy / REFUSED
            if refused.exists():
                raise CopyError(refused.read_text(encoding="utf-8"))
            try:
                pipe = os.open(self._copy / REQUEST, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO or not _lives(_pid(self._copy)):
                    raise CopyError("the frozen copy has ended") from None
                if end_s is not None and time.monotonic() > end_s:
                    raise CopyError("the frozen copy does not answer") from None
                time.sleep(POLL_S)
                continue
            with self._sending, os.fdopen(pipe, "wb") as stream:
                os.set_blocking(pipe, True)
                stream.write(f"{json.dumps(request)}\n".encode())
            return


def _pid(folder: Path) -> int:
    return int((folder / PID).read_text(encoding="ascii"))


def _lives(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
