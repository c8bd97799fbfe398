"""Running a command with the hooks armed in every Python process that it starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from steptune.tuner.errors import PlatformError
from steptune.tuner.installation import IMPORT_ROOT
from steptune.tuner.scripts.agent import FOLDER
from steptune.tuner.scripts.record import NO_VIEW, SETTINGS, ScriptRecord, read_records
from steptune.tuner.trials.processes import LINUX

ARMED = Path(__file__).parent / "armed"
NO_MESSAGES = {"KINETO_LOG_LEVEL": "99"}
"""The profiler says on standard error that it begins and ends."""
NO_RUNS = {"WANDB_MODE": "disabled"}
"""An inspection is no run to report."""
INTERRUPT_S = 8.0
"""Time for the command to end after an interrupt, before its processes are killed."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended.

    Attributes:
        status: As a shell has it.
        records: One for each process that used torch to make or train something, the recorded ones first, by rank.
        traces: Of the recorded ranks.
    """

    status: int
    records: tuple[ScriptRecord, ...]
    traces: tuple[Path, ...]


@contextmanager
def ran_script(
    command: Sequence[str], *, full: bool = False, in_place: bool = False, own_output: bool = True
) -> Iterator[Ended]:
    """Run a command in this folder with the hooks armed; its traces are there until the context ends.

    Args:
        full: Let it run to its end, in place.
        in_place: Let it write where it stands; otherwise it works in a copy-on-write view of the folder.
        own_output: Leave it standard output; otherwise what it prints goes to standard error.

    Raises:
        PlatformError: There can be no view here.
        KeyboardInterrupt: No process of the command is left.
    """
    with _temporary_folder() as folder:
        record = folder / "record"
        view = None if full or in_place else folder / "view"
        record.mkdir()
        (record / SETTINGS).write_text(json.dumps({"full": full}), encoding="utf-8")
        if view is not None:
            if not LINUX:
                raise PlatformError(_no_view("only Linux has overlays"))
            view.mkdir()
        status = _supervised(command, record, view, NO_MESSAGES | ({} if full else NO_RUNS), own_output=own_output)
        reason = record / NO_VIEW
        if reason.exists():
            raise PlatformError(_no_view(reason.read_text(encoding="utf-8")))
        yield Ended(status=status, records=read_records(record), traces=find_script_traces(record))


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Make a folder that is gone at the end, with all that a script has put there, and nothing that a link leads to.

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
    """Names of a folder's entries that are links to folders outside that can be written: they are in no view of it."""
    root = folder.resolve()
    links = [path for path in folder.iterdir() if path.is_symlink() and path.is_dir()]
    out = (path.name for path in links if not path.resolve().is_relative_to(root) and os.access(path, os.W_OK))
    return tuple(sorted(out))


def find_script_traces(folder: Path) -> tuple[Path, ...]:
    """The traces in a folder of records, by rank."""
    return tuple(sorted(folder.glob("trace-*.json"), key=lambda path: int(path.stem.partition("-")[2])))


def _no_view(reason: str) -> str:
    return (
        f"there can be no copy-on-write view of {Path.cwd()}: {reason}. --in-place runs the script where it stands: "
        "what it writes until its steps are recorded stays"
    )


def _supervised(
    command: Sequence[str], record: Path, view: Path | None, variables: dict[str, str], *, own_output: bool
) -> int:
    own = {name: value for name, value in variables.items() if name not in os.environ}
    path = os.pathsep.join(filter(None, (str(ARMED), os.environ.get("PYTHONPATH"))))
    given = {
        "record": str(record),
        "view": str(view) if view is not None else None,
        "parent": os.getpid(),
        "command": list(command),
        "variables": {**own, "PYTHONPATH": path, FOLDER: str(record)},
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _SUPERVISOR, str(IMPORT_ROOT), json.dumps(given)],
        stdout=None if own_output else sys.stderr,
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(INTERRUPT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.terminate()
            process.wait()
        raise


_SUPERVISOR = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from steptune.tuner.scripts.supervisor import supervise
given = json.loads(sys.argv[2])
view = Path(given["view"]) if given["view"] else None
os._exit(supervise(Path(given["record"]), given["parent"], view, given["variables"], given["command"]))
"""
"""The supervisor's program: `-P` keeps modules of the user's folder out."""
