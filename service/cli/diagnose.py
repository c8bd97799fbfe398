"""`profile` and `doctor`: the bottleneck of a workload's or script's step, and problems of this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.text import Text

from steptune.service.cli.commands import (
    COMMAND,
    NOT_PROFILED,
    CommandOrWorkload,
    check_command,
    name_links_out,
    refuse_options,
    require_workload,
)
from steptune.service.cli.console import errors, output, print_json, say, settings_with
from steptune.service.cli.options import AsJson, Database, Device, ForeignLoad, Isolation, Python, Seed, Workload
from steptune.service.tables import plain_table
from steptune.tuner.errors import ChoiceError
from steptune.tuner.hardware import check_platform
from steptune.tuner.records import MeasureSettings

if TYPE_CHECKING:
    from steptune.service.doctor import Examined


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(cls=CommandOrWorkload)(profile)
    app.command()(doctor)


def profile(
    context: typer.Context,
    workload: Workload = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the trace to this path (.json.gz, opens in Perfetto).", show_default=False),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="With a command: run it to its end, in its folder, and keep the files that it writes."
        ),
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            help="With a command: run it until its steps are recorded, but let it write into its folder, not into a "
            "temporary view.",
        ),
    ] = False,
    seed: Seed = 0,
    device: Device = None,
    foreign_load: ForeignLoad = MeasureSettings().foreign_cpu_share,
    python: Python = None,
    isolation: Isolation = None,
    as_json: AsJson = False,
) -> None:
    """Profile WORKLOAD, or the unchanged training script of a command: where a step's time goes, and how to reduce it.

    Write the command after `--`, as you type it: `steptune profile -- python train.py --lr 1e-3`, or torchrun,
    accelerate launch, a shell script. Steptune ends the command once it has recorded enough steps.
    """
    check_platform()
    command: tuple[str, ...] | None = context.meta.get(COMMAND)
    if command is None:
        if full or in_place:
            raise ChoiceError("--full and --in-place require a command: write it after `--`")
        workload = require_workload(workload, "profile")
        _profile_workload(workload, trace, seed, device, foreign_load, python, isolation, as_json=as_json)
        return
    check_command(command, workload, "profile")
    refuse_options(context, ("seed", "device", "foreign_load", "python", "isolation"))
    _profile_script(command, trace, full=full, in_place=in_place, as_json=as_json)


def _profile_workload(
    workload: str,
    trace: Path | None,
    seed: int,
    device: str | None,
    foreign_load: float,
    python: Path | None,
    isolation: str | None,
    *,
    as_json: bool,
) -> None:
    from steptune.service.profiling import print_profile, profile_workload

    with errors.status("profiling") as status, tempfile.TemporaryDirectory(prefix="steptune-") as folder:
        result = profile_workload(
            workload,
            Path(folder),
            trace=trace,
            seed=seed,
            device=device,
            python=str(python) if python else None,
            foreign_load=foreign_load,
            settings=settings_with(None, isolation),
            listener=lambda progress: status.update(escape(progress.text)),
        )
    if as_json:
        print_json(result)
    else:
        print_profile(output, result)
    if trace is not None:
        say(f"trace {trace}")


def _profile_script(command: tuple[str, ...], trace: Path | None, *, full: bool, in_place: bool, as_json: bool) -> None:
    from steptune.service.interrupts import interruptible
    from steptune.service.script_profile import keep_trace, print_script_profile, script_profile
    from steptune.tuner.scripts.launch import ran_script

    if not full and not in_place:
        name_links_out()
    script = ran_script(command, full=full, in_place=in_place, own_output=not as_json)
    with interruptible(), script as ended:
        result = script_profile(command, ended)
        kept = keep_trace(ended.traces, trace) if trace is not None else ()
    if as_json:
        print_json(result)
    else:
        print_script_profile(output, result)
    for path in kept:
        say(f"trace {path}")
    if result.refusal:
        raise typer.Exit(ended.status or NOT_PROFILED)


def doctor(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Output of one run with NCCL_DEBUG=INFO, one file or one per rank: shows how its ranks communicate "
            "and what slows them.",
            metavar="LOG",
            show_default=False,
        ),
    ] = None,
    network: Annotated[
        bool,
        typer.Option("--network", help="Examine this host's network for NCCL: GPUDirect RDMA and its requirements."),
    ] = False,
    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            help="Examine the network of another host from copies of its /sys, /proc, /etc and /dev in this directory.",
            show_default=False,
        ),
    ] = None,
    topology: Annotated[
        bool,
        typer.Option("--topology", help="Measure the links between ranks on this machine, for later studies."),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="With --topology: number of ranks (default: one per GPU, or two on a CPU).",
            show_default=False,
        ),
    ] = None,
    device: Device = None,
    remeasure_links: Annotated[
        bool,
        typer.Option(
            "--remeasure-links", help="With --topology: measure again, even if there are earlier measurements."
        ),
    ] = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Examine this machine, or the network of a host or of a run; exit with status 1 where there is a problem."""
    if topology:
        from steptune.service.cli.topology import doctor_topology

        if logs or network or root is not None:
            raise ChoiceError(
                "--topology cannot be combined with --network, --root or logs: examine them in a separate call"
            )
        check_platform()
        doctor_topology(num_ranks=ranks, device=device, database=database, remeasure=remeasure_links, as_json=as_json)
        return
    if ranks is not None or remeasure_links:
        raise ChoiceError("--ranks and --remeasure-links require --topology: add it, or leave them out")
    if logs or network or root is not None:
        from steptune.service.cli.network import doctor_network

        doctor_network(root or (Path("/") if network else None), logs or [], as_json)
        return
    from steptune.service.doctor import examine

    check_platform()
    with errors.status("inspecting this machine"):
        findings = examine()
    if as_json:
        print_json(findings)
    else:
        _print_findings(findings)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def _print_findings(findings: list[Examined]) -> None:
    table = plain_table("", "what", "found")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    marks = {"ok": ("✓", "green"), "note": ("·", "blue"), "problem": ("!", "yellow")}
    for finding in findings:
        mark, style = marks[finding.level]
        found = Text(finding.found)
        if finding.advice:
            found.append(f"\n{finding.advice}", style=style)
        table.add_row(Text(mark, style=style), finding.subject, found)
    output.print(table)
