"""Files of the machine that a sandbox shows: the system, the interpreter, the workload, and nothing of the service."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from steptune.tuner.errors import IsolationUnavailableError
from steptune.tuner.installation import trial_folders
from steptune.tuner.workloads.reference import parse_reference

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/sys")
"""System folders, shown read-only where they exist. /sys tells torch, NCCL and NVML about cores and devices."""
CONFIGURATION = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "ssl/certs")
"""Entries of /etc that are shown: no passwords, no host names, no keys."""
NETWORK_CONFIGURATION = ("resolv.conf", "hosts", "host.conf", "gai.conf")
MAX_PARTS = 256
_LOOK = (
    "import json, sys; "
    "print(json.dumps([sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path]))"
)


def system_paths(*, network: bool) -> list[Path]:
    names = (*CONFIGURATION, *(NETWORK_CONFIGURATION if network else ()))
    return [path for path in (*map(Path, SYSTEM), *(Path("/etc") / name for name in names)) if path.exists()]


def interpreter_paths(python: str, environment: Mapping[str, str], hidden: Sequence[Path]) -> list[Path]:
    """Return the paths of the interpreter, its environment, the folders outside the environment from which it imports,
    and this package.
    """
    prefixes, others = _interpreter(python, environment.get("PYTHONPATH", ""))
    found = [Path(prefix) for prefix in prefixes if Path(prefix).is_dir()]
    executable = Path(os.path.realpath(python))
    if not any(executable.is_relative_to(place) for place in (*found, *map(Path, SYSTEM))):
        found.append(executable.parent.parent)
    for path in [*trial_folders(), *map(Path, others)]:
        if path.exists() and not any(path.is_relative_to(place) for place in (*found, *map(Path, SYSTEM))):
            found += visible_parts(path, hidden)
    libraries = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return [*found, *(Path(path) for path in libraries if path and Path(path).is_dir())]


@functools.cache
def _interpreter(python: str, python_path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": python_path}
    try:
        done = subprocess.run(
            [python, "-P", "-c", _LOOK], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise IsolationUnavailableError(
            f"{python} failed to report its folders: {error}; name another interpreter with --python"
        ) from None
    places = json.loads(done.stdout)
    return tuple(places[:4]), tuple(place for place in places[4:] if place.startswith("/"))


def workload_paths(workload: str, hidden: Sequence[Path]) -> tuple[list[Path], Path | None]:
    """Return the paths of a workload, and the folder in which a user would run it.

    Raises:
        IsolationUnavailableError: There are too many files beside it.
    """
    reference = parse_reference(workload)
    if reference.kind == "file":
        folder = reference.path.parent
        return visible_parts(folder, hidden), folder
    top = reference.source.partition(".")[0]
    local = [path for path in (Path.cwd() / top, Path.cwd() / f"{top}.py") if path.exists()]
    return local, Path.cwd() if local else None


def visible_parts(folder: Path, hidden: Iterable[Path]) -> list[Path]:
    """Return a folder; if something in it must be hidden, return its visible parts instead. Names that begin with a
    dot, and the service's own files, are hidden.

    Of a home directory, only its Python files are visible.

    Raises:
        IsolationUnavailableError: There would be hundreds of parts.
    """
    hidden = [path.absolute() for path in hidden]
    parts = list(_parts(folder, hidden))
    if len(parts) > MAX_PARTS:
        raise IsolationUnavailableError(
            f"{folder} must hold at most {MAX_PARTS} files and folders for a sandbox, got {len(parts)}: move "
            "the workload to a folder of its own, and its data into subfolders"
        )
    return parts


def _parts(folder: Path, hidden: Sequence[Path], *, top: bool = True) -> Iterator[Path]:
    if any(_same_file(folder, secret) for secret in hidden):
        return
    inside = [secret for secret in hidden if secret.is_relative_to(folder)]
    home = Path.home()
    if not folder.is_dir() or not (inside or (top and _has_dots(folder)) or home.is_relative_to(folder)):
        yield folder
        return
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or not os.access(entry, os.R_OK):
            continue
        if home.is_relative_to(folder) and entry.suffix != ".py":
            continue
        yield from _parts(entry, hidden, top=False)


def _has_dots(folder: Path) -> bool:
    return any(entry.name.startswith(".") for entry in folder.iterdir())


def _same_file(path: Path, secret: Path) -> bool:
    """Say whether a path is the given secret file, or a file that SQLite keeps for it in the same folder:
    `steptune.db-wal`, `-shm`, `-journal`.
    """
    return path == secret or (path.parent == secret.parent and path.name.startswith(f"{secret.name}-"))
