"""`doctor` for networks: checks of a host, and of the logs of a run, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.text import Text

from steptune.service.cli.console import errors, output, print_json
from steptune.service.tables import plain_table
from steptune.tuner.network.examine import examine_host
from steptune.tuner.network.finding import Level, NetworkFinding
from steptune.tuner.network.log_checks import examine_logs

MARKS = {
    Level.OK: ("✓", "green"),
    Level.NOTE: ("·", "blue"),
    Level.PROBLEM: ("!", "yellow"),
    Level.UNKNOWN: ("?", "magenta"),
}


def doctor_network(root: Path | None, logs: Sequence[Path], as_json: bool) -> None:
    """Examine the host whose files are under `root`, if given, and the logs of a run; print the findings.

    Raises:
        typer.Exit: With status 1 where there is a problem, or something could not be examined.
    """
    findings: list[NetworkFinding] = []
    log = None
    with errors.status("inspecting the network"):
        if root is not None:
            findings += examine_host(root)
        if logs:
            log, said = examine_logs(logs)
            findings += said
    if as_json:
        print_json({"findings": findings, "log": log})
    else:
        _print(findings)
    if any(finding.level in (Level.PROBLEM, Level.UNKNOWN) for finding in findings):
        raise typer.Exit(1)


def _printable(text: str) -> str:
    """Remove control characters from the text of a file or log: they would move the cursor or colour the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def _print(findings: Sequence[NetworkFinding]) -> None:
    table = plain_table("", "what", "found")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for finding in findings:
        mark, style = MARKS[finding.level]
        found = Text(_printable(finding.found))
        if finding.effect:
            found.append(f"\neffect: {finding.effect}", style="dim")
        if finding.fix:
            found.append(f"\nfix: {finding.fix}", style=style)
        table.add_row(Text(mark, style=style), finding.subject, found)
    output.print(table)
