"""Runs of a command with the hooks armed in every Python process that it starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptune.tuner.errors import PlatformError
from steptune.tuner.installation import IMPORT_ROOT
from steptune.tuner.scripts.agent import FOLDER
from steptune.tuner.scripts.record import NO_VIEW, SETTINGS, STATUS, TEXTS, ScriptRecord, read_records
from steptune.tuner.trials.processes import LINUX

ARMED = Path(__file__).parent / "armed"
NO_MESSAGES = {"KINETO_LOG_LEVEL": "99"}
"""Environment variables that suppress the profiler's messages on standard error."""
NO_RUNS = {"WANDB_MODE": "disabled"}
"""Environment variables that disable experiment trackers, because an inspection is not a run to report."""
INTERRUPT_S = 8.0
"""Grace period after an interrupt, in seconds: processes of the command that have not ended by then are killed."""
CHECK_S = 0.5
"""Seconds between two checks of whether a command is to continue."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Result of a command that has ended.

    Attributes:
        status: Exit status, as in a shell.
        records: Records, one for each process that made or trained something with torch; the recorded ones first, by
            rank.
        traces: Traces of the recorded ranks.
        folder: Folder of the record, with the files of a trial.
        timed_out: Whether it was ended because it exceeded its time limit.
        forked: Whether it continued from a frozen copy.
    """

    status: int
    records: tuple[ScriptRecord, ...]
    traces: tuple[Path, ...]
    folder: Path = Path()
    timed_out: bool = False
    forked: bool = False


@contextmanager
def ran_script(
    command: Sequence[str],
    *,
    full: bool = False,
    in_place: bool = False,
    own_output: bool = True,
    trial: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    frozen_seed: int | None = None,
    folder: Path | None = None,
    log: Path | None = None,
    longest_s: float | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[Ended]:
    """Run a command with the hooks armed; its record and traces exist until the context ends.

    Args:
        full: Whether it runs to its end, in place.
        in_place: Whether it writes in the folder itself; otherwise, in a copy-on-write view of it.
        own_output: Whether it keeps standard output; otherwise its output goes to standard error.
        trial: Task of a trial (`agent/trial.py`); None for an inspection.
        variables: Environment variables of the command, which override the current ones.
        texts: Other texts of files, by their path below the folder: written into the view.
        frozen_seed: Seed of an inspection that leaves frozen copies (`copies.py`), which live until the context ends;
            None leaves none.
        folder: Folder in which it runs; the current one by default.
        log: File for its output.
        longest_s: Time limit in seconds.
        check: Called several times a second while it runs; an exception from it ends the command.

    Raises:
        PlatformError: This system cannot make a view.
        KeyboardInterrupt: The user interrupted; all processes of the command have been ended.
    """
    folder = folder or Path.cwd()
    with _temporary_folder() as temporary:
        record = temporary / "record"
        view = None if full or in_place else temporary / "view"
        record.mkdir()
        (record / SETTINGS).write_text(json.dumps({"full": full, "trial": trial, "frozen_seed": frozen_seed}))
        (record / TEXTS).write_text(json.dumps(dict(texts or {})), encoding="utf-8")
        if view is not None:
            if not LINUX:
                raise PlatformError(_no_view(folder, "overlays require Linux", is_trial=trial is not None))
            view.mkdir()
        own = {name: value for name, value in NO_MESSAGES.items() if name not in os.environ}
        if not full:
            own |= {name: value for name, value in NO_RUNS.items() if name not in os.environ}
        run = _Run(
            command=command,
            folder=folder,
            record=record,
            view=view,
            variables={**own, **(variables or {})},
            keeps_copies=frozen_seed is not None,
        )
        with _output_of(log, own_output=own_output) as stream:
            status = run.wait(stream, longest_s, check)
        reason = record / NO_VIEW
        if reason.exists():
            why = reason.read_text(encoding="utf-8")
            raise PlatformError(_no_view(folder, why, is_trial=trial is not None))
        try:
            yield ended_in(record, status)
        finally:
            run.end()


def ended_in(record: Path, status: int | None) -> Ended:
    """Return the result of a command from its record; `status` None means that the command exceeded its time limit."""
    return Ended(
        status=128 + signal.SIGALRM if status is None else status,
        timed_out=status is None,
        folder=record,
        records=read_records(record),
        traces=find_script_traces(record),
    )


@contextmanager
def _output_of(log: Path | None, *, own_output: bool) -> Iterator[Any]:
    """Provide the output of a command: its own streams, standard error alone, or a file."""
    if log is None:
        yield None if own_output else sys.stderr
        return
    with log.open("ab") as file:
        yield file


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Create a temporary folder, and remove it at the end with all its content, without following links.

    `tempfile.TemporaryDirectory` changes permissions through links before Python 3.11.8 and 3.12.1 (CVE-2023-6597).
    """
    folder = Path(tempfile.mkdtemp(prefix="steptune-script-"))
    try:
        yield folder
    finally:
        for place, names, _ in os.walk(folder):  # a folder that may not be written cannot be emptied
            for path in (Path(place, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
        if folder.exists():  # the script may have emptied the temporary directory
            shutil.rmtree(folder)


def find_links_out(folder: Path) -> tuple[str, ...]:
    """Return the names of links in a folder to writable folders outside it. A copy-on-write view of the folder does not
    cover the outside folders.
    """
    root = folder.resolve()
    links = [path for path in folder.iterdir() if path.is_symlink() and path.is_dir()]
    out = (path.name for path in links if not path.resolve().is_relative_to(root) and os.access(path, os.W_OK))
    return tuple(sorted(out))


def find_script_traces(folder: Path) -> tuple[Path, ...]:
    """Return the traces in a folder of records, by rank."""
    return tuple(sorted(folder.glob("trace-*.json"), key=lambda path: int(path.stem.partition("-")[2])))


def _no_view(folder: Path, reason: str, *, is_trial: bool) -> str:
    refusal = f"a copy-on-write view of {folder} is not possible: {reason}"
    if is_trial:
        return (
            f"{refusal}. Without a view, trials would overwrite each other's files and yours, so the script is "
            "not tuned"
        )
    return (
        f"{refusal}. With --in-place the script runs without a view: the files that it writes before the end of the "
        "recording stay in the folder"
    )


@dataclass(kw_only=True)
class _Run:
    """One run of a command under a supervisor."""

    command: Sequence[str]
    folder: Path
    record: Path
    view: Path | None
    variables: Mapping[str, str]
    keeps_copies: bool
    process: subprocess.Popen[bytes] | None = None

    def wait(self, stream: Any, longest_s: float | None, check: Callable[[], None] | None) -> int | None:
        """Run the command to its end, and return its exit status; None if it exceeded its time limit."""
        path = os.pathsep.join(filter(None, (str(ARMED), os.environ.get("PYTHONPATH"))))
        given = {
            "record": str(self.record),
            "view": str(self.view) if self.view is not None else None,
            "parent": os.getpid(),
            "command": list(self.command),
            "keeps_copies": self.keeps_copies,
            "variables": {**self.variables, "PYTHONPATH": path, FOLDER: str(self.record)},
        }
        process = self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SUPERVISOR, str(IMPORT_ROOT), json.dumps(given)],
            cwd=self.folder,
            stdout=stream,
            stderr=stream if stream is not None and stream is not sys.stderr else None,
        )
        try:
            return _status_of(process, self.record / STATUS if self.keeps_copies else None, longest_s, check)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return None
        except KeyboardInterrupt:
            try:
                process.wait(INTERRUPT_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.terminate()
                process.wait()
            raise
        except BaseException:  # of the check
            process.terminate()
            process.wait()
            raise

    def end(self) -> None:
        """End a supervisor that keeps frozen copies of a process; the copies end with it."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


def _status_of(
    process: subprocess.Popen[bytes], status: Path | None, longest_s: float | None, check: Callable[[], None] | None
) -> int:
    """Wait for a command while running a check at intervals, and return the command's exit status.

    Args:
        status: File for the exit status, if the process may continue afterwards.
    """
    if check is None and status is None:
        return process.wait(longest_s)
    began = time.monotonic()
    while longest_s is None or time.monotonic() - began < longest_s:
        if check is not None:
            check()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(CHECK_S)
        if status is not None and status.exists():
            return int(status.read_text(encoding="ascii"))
    raise subprocess.TimeoutExpired(process.args, longest_s)


_SUPERVISOR = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from steptune.tuner.scripts.supervisor import supervise
given = json.loads(sys.argv[2])
view = Path(given["view"]) if given["view"] else None
record, keeps = Path(given["record"]), given["keeps_copies"]
os._exit(supervise(record, given["parent"], view, given["variables"], given["command"], keeps_copies=keeps))
"""
"""Program of the supervisor process. `-P` keeps modules of the user's folder off its path."""
