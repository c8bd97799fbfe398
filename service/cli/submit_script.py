"""`submit -- COMMAND`: send a training script to the workers of a service."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from steptune.service.cli.commands import check_command, refuse_secrets
from steptune.service.cli.console import say
from steptune.service.client import Client
from steptune.service.client.packing import python_sources
from steptune.service.script_source import ScriptManifest, check_variables, imported_packages, interpreter_of
from steptune.tuner.errors import ChoiceError
from steptune.tuner.workloads.reference import workload_of

SHOWN = 6
MOST_CHARACTERS = 500


def manifest_of(
    command: Sequence[str], folder: Path, env: Sequence[str], data: Sequence[str], *, other_versions: bool
) -> ScriptManifest:
    """Build the manifest, which says how to run the script, from the command line.

    Raises:
        ChoiceError: The command, a variable or a path of data means something on this machine only.
        WorkloadRejectedError: A variable sounds like a secret.
    """
    check_command(command, None, "submit")
    refuse_secrets(command)
    if Path(command[0]).is_absolute():
        raise ChoiceError(
            f"{command[0]} may be absent on workers: write {Path(command[0]).name} to use the worker's own"
        )
    length = len(workload_of(command))
    if length > MOST_CHARACTERS:
        raise ChoiceError(
            f"a command must have at most {MOST_CHARACTERS} characters, got {length}: put its arguments into a script"
        )
    check_variables({name: os.environ.get(name, "") for name in env})
    absent = [name for name in env if name not in os.environ]
    if absent:
        raise ChoiceError(f"--env {absent[0]} names a variable that is not set here: set it, or leave the option out")
    return ScriptManifest(
        command=tuple(command),
        variables={name: os.environ[name] for name in env},
        packages=imported_packages(python_sources(folder), interpreter_of(command)),
        data=dict(_place_of(path, folder) for path in data),
        other_versions=other_versions,
    )


def send_script(client: Client, folder: Path, manifest: ScriptManifest) -> str:
    """Send a script, and print which files were sent; return the id of the uploaded workload."""
    sent, packed = client.upload_script(folder, manifest)
    say(f"sent {sent.name} ({sent.size_bytes:,} bytes): {_some(packed.files)}", style="dim")
    named = {Path(name) for name in manifest.data}
    left_out = [n for n in packed.left_out if not n.startswith(".") and not named & {Path(n), *Path(n).parents}]
    if left_out:
        say(
            f"not uploaded: {_some(left_out)}. If the script reads one of them, workers need a copy: name it with "
            "--data PATH",
            style="yellow",
        )
    return sent.workload_id


def _place_of(path: str, folder: Path) -> tuple[str, str]:
    """Return the path of data as the script names it, and the path at which a worker must have the data."""
    if path.startswith("/"):
        return path, path
    name = os.path.normpath(path)
    if name.startswith(".."):
        raise ChoiceError(f"--data {path} is outside this folder: give an absolute path")
    return name, str((folder / name).resolve())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
