"""A submitted script: its sources, and a manifest that says how it is run and what it needs on a worker."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import field

from steptune.service.secret_names import VARIABLE, holds_secret, secret_in
from steptune.tuner.errors import WorkloadRejectedError
from steptune.tuner.records import Record

MANIFEST = ".steptune-script.json"
"""Name of the manifest, which is in the same archive as the sources."""
MANIFEST_BYTES = 1 << 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_A_MACHINE = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
_INSTALLED = """
import json, sys
from importlib import metadata
found = {}
modules, names = json.load(sys.stdin)
known = metadata.packages_distributions() if modules else {}
for name in {*names, *(one for module in modules for one in known.get(module, ()))}:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class ScriptManifest(Record):
    """Manifest of a submitted script: how it is launched, and what a worker must have.

    Attributes:
        command: Command as its user typed it.
        variables: Environment variables that the user named.
        packages: Versions, on the submitting machine, of the packages that its sources import.
        data: Paths as the script names them, and where a worker must have them.
        other_versions: Whether a worker may have other versions of the packages.
    """

    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    other_versions: bool = False


def read_manifest(folder: Path) -> ScriptManifest:
    """Read the manifest of the script in a folder.

    Raises:
        WorkloadRejectedError: There is no such file, it cannot be read, or it names what sounds like a secret.
    """
    try:
        with (folder / MANIFEST).open("rb") as file:
            manifest = msgspec.json.decode(file.read(MANIFEST_BYTES), type=ScriptManifest)
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WorkloadRejectedError(
            f"{MANIFEST} in the archive of a script cannot be read ({reason}): send the script with `steptune "
            "submit -- COMMAND`"
        ) from None
    if not manifest.command:
        raise WorkloadRejectedError(f"{MANIFEST} has no command")
    name = secret_in(manifest.command)
    if name is not None:
        raise WorkloadRejectedError(
            f"{name} of the command looks like a secret, but everyone who can see a study can see its command: let "
            "the script read it from "
            "a file or the environment of the worker"
        )
    check_variables(manifest.variables)
    for name in manifest.data:
        if name.startswith("/"):
            continue
        if ".." in Path(name).parts:
            raise WorkloadRejectedError(f"data {name!r} is outside the script's folder: give an absolute path")
        if not manifest.data.keys().isdisjoint(map(str, Path(name).parents)):
            raise WorkloadRejectedError(f"data {name!r} is inside another named data path: leave it out")
    return manifest


def check_variables(variables: Mapping[str, str]) -> None:
    """Refuse environment variables that seem to hold secrets, or that are specific to one machine, such as `PATH`.

    Raises:
        WorkloadRejectedError: There is such a variable; the message names the first one, and the ways out.
    """
    for name, value in variables.items():
        if VARIABLE.search(name) or holds_secret(value):
            raise WorkloadRejectedError(
                f"{name} looks like a secret, but the service stores the variables with the study: set it in "
                "the worker's own environment, or let the script read it from a file on the worker"
            )
        if name in _OF_A_MACHINE or not _NAME.fullmatch(name):
            raise WorkloadRejectedError(
                f"{name!r} is not a valid variable name, or is specific to this machine: leave it out"
            )


def interpreter_of(command: Sequence[str], path: str | None = None) -> str:
    """Return the Python interpreter that a command runs: the command itself, or the `python` in the command's own
    folder.

    Args:
        path: Path on which commands are searched; None for this process's PATH.
    """
    found = shutil.which(command[0], path=path)
    if found is None:
        return sys.executable
    if Path(found).name.startswith("python"):
        return found
    beside = Path(found).with_name("python")
    return str(beside) if beside.exists() else sys.executable


def imported_packages(sources: Iterable[Path], python: str) -> dict[str, str]:
    """Return the versions of the packages that these files import at any place in their code, as installed for an
    interpreter.
    """
    modules: set[str] = set()
    for path in sources:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template, or of another Python: the script says so itself
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.partition(".")[0])
    return _installed(python, modules=sorted(modules))


def check_packages(manifest: ScriptManifest, python: str) -> None:
    """Refuse to run a script if its packages differ from those on the machine from which it was submitted.

    Raises:
        WorkloadRejectedError: Packages are missing, or have another version; the message names them.
    """
    here = _installed(python, names=sorted(manifest.packages))
    missing = [f"{name} {version}" for name, version in sorted(manifest.packages.items()) if name not in here]
    if missing:
        raise WorkloadRejectedError(f"the worker has no {', '.join(missing)}: install it there")
    others = [
        f"{name} {here[name]} in place of {version}"
        for name, version in sorted(manifest.packages.items())
        if _public(here[name]) != _public(version)
    ]
    if others and not manifest.other_versions:
        raise WorkloadRejectedError(
            f"the worker has {', '.join(others)}: install the submitted versions there, or submit with --other-versions"
        )


def link_data(manifest: ScriptManifest, folder: Path) -> None:
    """Create links to the data at the paths where the script expects them.

    Raises:
        WorkloadRejectedError: The worker does not have them.
    """
    absent = [place for place in manifest.data.values() if not Path(place).exists()]
    if absent:
        raise WorkloadRejectedError(
            f"the worker has no {', '.join(absent)}: mount it there, or name another path with --data"
        )
    for name, place in manifest.data.items():
        if not name.startswith("/"):
            path = folder / name
            if path.exists():
                raise WorkloadRejectedError(
                    f"{name} is both named with --data and contained in the submitted sources: leave out one of them"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(place)


def _installed(python: str, *, modules: Sequence[str] = (), names: Sequence[str] = ()) -> dict[str, str]:
    given = json.dumps([modules, names])
    done = subprocess.run([python, "-I", "-c", _INSTALLED], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WorkloadRejectedError(f"{python} failed to list its packages: {done.stderr.strip()[-200:]}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _public(version: str) -> str:
    """Return a version without its build label: 2.13.0 for 2.13.0+cpu."""
    return version.partition("+")[0]
