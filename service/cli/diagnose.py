"""`profile` and `doctor`: what limits a step, and what is wrong with this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from service.cli.console import errors, output, print_json
from service.cli.options import AsJson, Device, Python, Seed, WorkloadName
from tuner.hardware import check_platform


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(profile)
    app.command()(doctor)


def profile(
    workload: WorkloadName,
    trace: Annotated[
        Path | None, typer.Option(help="Keep the trace here (.json.gz, opens in Perfetto).", show_default=False)
    ] = None,
    seed: Seed = 0,
    device: Device = None,
    python: Python = None,
    as_json: AsJson = False,
) -> None:
    """Profile WORKLOAD as it is: where a step's time goes, and what could be done about it."""
    from service.profiling import print_profile, profile_workload

    check_platform()
    with errors.status("profiling") as status, tempfile.TemporaryDirectory(prefix="steptune-") as folder:
        result = profile_workload(
            workload,
            Path(folder),
            trace=trace,
            seed=seed,
            device=device,
            python=str(python) if python else None,
            listener=lambda progress: status.update(progress.text),
        )
    if as_json:
        print_json(result)
    else:
        print_profile(output, result)
    if trace is not None:
        errors.print(f"trace {trace}")


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine offers, and what is missing or misconfigured."""
    from service.doctor import examine

    check_platform()
    with errors.status("looking at this machine"):
        findings = examine()
    if as_json:
        print_json(findings)
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("", "what", "found", "effect and way out"):
        table.add_column(name, overflow="fold")
    marks = {"ok": ("✓", "green"), "note": ("·", "blue"), "problem": ("!", "yellow")}
    for finding in findings:
        mark, style = marks[finding.level]
        table.add_row(Text(mark, style=style), finding.subject, Text(finding.found), Text(finding.advice))
    output.print(table)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)
