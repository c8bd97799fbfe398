"""`zoo` and `strategies`: what there is."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from service.cli.console import errors, output, print_json
from service.cli.options import AsJson, Device
from tuner.records import Environment, WorkloadFacts, choice_label
from tuner.strategies import STRATEGIES, Strategy
from tuner.strategies.base import Unsupported
from tuner.workloads.zoo import ZOO


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(zoo)
    app.command()(strategies)


def zoo(as_json: AsJson = False) -> None:
    """List the ready workloads."""
    rows = [
        {
            "reference": f"zoo:{entry.name}",
            "summary": entry.summary,
            "missing": [name for name in entry.needs if importlib.util.find_spec(name) is None],
        }
        for entry in ZOO
    ]
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("workload", "what it is", "needs"):
        table.add_column(name, overflow="fold")
    for row in rows:
        missing = ", ".join(row["missing"])
        table.add_row(
            Text(str(row["reference"]), style="bold"), str(row["summary"]), f"pip install {missing}" if missing else ""
        )
    output.print(table)


def strategies(
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload", "-w", help="Judge for this workload, not for one that has everything.", show_default=False
        ),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """List the strategies, their choices, and what cannot be tried here and why."""
    from service.probing import look_here

    with errors.status("looking at this machine"):
        environment, facts = look_here(workload, device)
    rows = [_row(strategy, environment, facts) for strategy in STRATEGIES]
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("strategy", "what it sets", "choices here", "not here"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            Text(row["name"], style="bold"),
            row["summary"],
            Text("; ".join(row["choices"]) or "none"),
            Text(
                "\n".join(f"{reason}: {'; '.join(labels)}" for reason, labels in row["unsupported"].items()),
                style="dim",
            ),
        )
    output.print(table)
    output.print(f"\njudged for {environment.hardware.label}; {facts.name}", style="dim")


def _row(strategy: Strategy, environment: Environment, facts: WorkloadFacts) -> dict[str, Any]:
    choices: list[str] = []
    unsupported: dict[str, list[str]] = {}
    for choice in strategy.choices(environment, facts):
        difference = strategy.difference(choice, facts)
        if not difference:
            continue
        label = f"{choice_label(difference)} ({strategy.numerics(choice).value})"
        support = strategy.supports(choice, environment, facts)
        if isinstance(support, Unsupported):
            unsupported.setdefault(support.reason, []).append(label)
        else:
            choices.append(label)
    return {
        "name": strategy.name,
        "summary": strategy.summary,
        "neutral": choice_label(strategy.neutral(facts)),
        "choices": choices,
        "unsupported": unsupported,
    }
