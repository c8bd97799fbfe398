"""`submit`: send a study, with its workload, to the workers of a service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from steptune.service.cli.commands import COMMAND, CommandOrWorkload, check_command, refuse_options, require_workload
from steptune.service.cli.console import errors, output, print_json, say
from steptune.service.cli.options import (
    Allow,
    AsJson,
    Budget,
    Device,
    ForeignLoad,
    ObjectiveName,
    Only,
    QuietMachine,
    SearchName,
    Seed,
    Skip,
    parse_allowed,
    parse_names,
)
from steptune.service.cli.remote import Token, TokenFile, Url, connected
from steptune.service.cli.submit_script import manifest_of, send_script
from steptune.service.cli.watch import follow_to_its_end
from steptune.service.client import Client
from steptune.service.quantities import parse_bytes, parse_duration_s
from steptune.service.script_source import ScriptManifest
from steptune.tuner.errors import ChoiceError, WorkloadNotFoundError
from steptune.tuner.records import MeasureSettings
from steptune.tuner.workloads.reference import imported_modules, parse_reference
from steptune.tuner.workloads.zoo import known_reference

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")


def register(app: typer.Typer) -> None:
    """Add the command `submit` to the app."""
    app.command(cls=CommandOrWorkload)(submit)


def submit(
    context: typer.Context,
    workload: Annotated[
        str | None,
        typer.Argument(
            help="zoo:NAME or package.module:ClassName (installed on the workers), or path/to/file.py:ClassName, "
            "archive.tar.gz or FOLDER (uploaded). For a command after `--`, its sources in this folder are uploaded.",
            metavar="WORKLOAD",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="Folder to upload; it must contain WORKLOAD's file and the modules that the file imports.",
            show_default=False,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", help="Environment variable to send with a command; no others are sent.", show_default=False
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Path of data that the script reads and that the worker must have: absolute, or inside this folder "
            "(the worker then creates a link at that place).",
            show_default=False,
        ),
    ] = None,
    other_versions: Annotated[
        bool, typer.Option("--other-versions", help="Accept workers with other versions of the script's packages.")
    ] = False,
    budget: Budget = "10m",
    trials: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of trials that the search suggests.", show_default=False)
    ] = None,
    allow: Allow = None,
    only: Only = None,
    skip: Skip = None,
    search: SearchName = "model",
    objective: ObjectiveName = "throughput",
    seed: Seed = 0,
    device: Device = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of processes (ranks) of a trial.")] = 1,
    num_hosts: Annotated[
        int,
        typer.Option(
            min=1, help="Number of hosts, with the same number of ranks on each; a worker's cluster reserves them."
        ),
    ] = 1,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Memory limit per rank, like 8g (default: 90 % of free memory).",
            show_default=False,
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Hardware to run on: its fingerprint, or a part of its name.", show_default=False),
    ] = None,
    priority: Annotated[int, typer.Option(help="Priority among your own studies; higher ones run first.")] = 0,
    title: Annotated[str, typer.Option(help="Title of the study, shown in lists.")] = "",
    foreign_load: ForeignLoad = MeasureSettings().foreign_cpu_share,
    quiet_machine: QuietMachine = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show progress until the study has ended.")] = False,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Have a service tune WORKLOAD, or the training script that a command after `--` runs."""
    command: tuple[str, ...] | None = context.meta.get(COMMAND)
    manifest = _manifest(context, workload, command, env or (), data or (), other_versions=other_versions)
    request: dict[str, Any] = {
        "budget_s": parse_duration_s(budget),
        "max_trials": trials,
        "allow": [numerics.value for numerics in parse_allowed(allow or [])],
        "only": parse_names(only),
        "skip": parse_names(skip),
        "search": search,
        "objective": objective,
        "seed": seed,
        "device": device,
        "num_ranks": ranks,
        **({"num_hosts": num_hosts} if num_hosts > 1 else {}),  # servers of older versions know none
        "constraints": {"memory_limit_bytes": parse_bytes(memory_limit)} if memory_limit else None,
        "hardware": hardware,
        "priority": priority,
        "title": title,
        "foreign_cpu_share": foreign_load,
        "quiet_machine": quiet_machine,
    }
    with connected(url, token, token_file) as client:
        given = _given(client, workload, folder, manifest)
        study = client.submit(**given, **request)
        if not as_json:
            say(f"page {client.url}/studies/{study.study_id}")
            if study.queue is not None and study.queue.waits_for and not watch:
                say(f"the study waits for {study.queue.waits_for}")
        if watch:
            say(f"study {study.study_id}", style="dim")
            follow_to_its_end(client, study.study_id, errors, as_json=as_json)
        elif as_json:
            print_json(study)
        else:
            output.print(study.study_id)
            say(f"Waiting for a worker. Follow it with `steptune watch {study.study_id}`.")


def _manifest(
    context: typer.Context,
    workload: str | None,
    command: tuple[str, ...] | None,
    env: Sequence[str],
    data: Sequence[str],
    *,
    other_versions: bool,
) -> ScriptManifest | None:
    """Return the launch settings of the script, if a command was given."""
    if command is None:
        require_workload(workload, "submit")
        refuse_options(context, ("env", "data", "other_versions"), "scripts")
        return None
    check_command(command, workload, "submit")
    refuse_options(context, ("folder", "num_hosts", "memory_limit"))
    return manifest_of(command, Path.cwd(), env, data, other_versions=other_versions)


def _given(
    client: Client, workload: str | None, folder: Path | None, manifest: ScriptManifest | None
) -> dict[str, str]:
    """Return the fields that name the workload; a file, an archive, a folder or a script is uploaded first."""
    if manifest is not None:
        return {"workload_id": send_script(client, Path.cwd(), manifest)}
    assert workload is not None, "a workload or a command must be given"
    path, entry = _local(workload)
    if workload.startswith("zoo:"):
        known_reference(workload)
    if path is not None and entry:
        parse_reference(workload)  # the file and its class
        if folder is None:
            _check_alone(path)
    if folder is not None:
        if path is None or not entry:
            raise ChoiceError(
                f"--folder requires a workload file in that folder, like {folder}/train.py:MyWorkload, got {workload!r}"
            )
        entry = _within(folder, path, entry)
        path = folder
    if path is None:
        return {"workload": workload}
    if not path.exists():
        raise WorkloadNotFoundError(f"{path} does not exist: give the path of a workload file, an archive or a folder")
    sent = client.upload(path, entry=entry)
    say(f"sent {sent.name} ({sent.size_bytes:,} bytes): {sent.entry}", style="dim")
    return {"workload_id": sent.workload_id}


def _check_alone(path: Path) -> None:
    """Refuse to send a single file that imports modules from its own folder.

    Raises:
        ChoiceError: The file does so; the message names the first such module, and how to send it.
    """
    for name in imported_modules(path):
        top = name.partition(".")[0]
        if (path.parent / f"{top}.py").is_file() or (path.parent / top / "__init__.py").is_file():
            raise ChoiceError(
                f"{path} imports {top} from its own folder, which is not uploaded: add --folder {path.parent}"
            )


def _local(workload: str) -> tuple[Path | None, str]:
    """Return the path of a workload on this machine, and its entry within the upload; the path is None if workers
    already have the workload.
    """
    if workload.startswith("zoo:"):
        return None, ""
    target, question, query = workload.partition("?")
    source, colon, name = target.rpartition(":")
    if not colon:
        source = target
    path = Path(source)
    if source.endswith(".py"):
        return path, f"{path.name}:{name}{question}{query}" if colon else ""
    if source.endswith(ARCHIVES) or path.is_dir() or "/" in source:
        if colon:
            raise ChoiceError(
                f"{workload!r} names a class without its file: name both, as in --folder FOLDER "
                "FOLDER/train.py:MyWorkload"
            )
        return path, ""
    return None, ""


def _within(folder: Path, path: Path, entry: str) -> str:
    try:
        inside = path.resolve().relative_to(folder.resolve())
    except ValueError:
        raise ChoiceError(f"{path} is not in --folder {folder}: name a file in the folder to upload") from None
    return entry.replace(path.name, inside.as_posix(), 1)
