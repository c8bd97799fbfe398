"""`zoo` and `strategies`: the available workloads and strategies."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from steptune.service.cli.console import errors, output, print_json
from steptune.service.cli.options import AsJson, Device
from steptune.service.tables import plain_table
from steptune.tuner.hardware import check_platform
from steptune.tuner.records import Environment, WorkloadFacts, choice_label
from steptune.tuner.strategies import STRATEGIES, Strategy
from steptune.tuner.strategies.api import Unsupported
from steptune.tuner.strategies.knobs import with_knobs
from steptune.tuner.workloads.zoo import ZOO


def register(app: typer.Typer) -> None:
    """Add the commands."""
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
    table = plain_table("workload", "what it is")
    table.columns[0].no_wrap = True
    for row in rows:
        summary = Text(str(row["summary"]))
        if row["missing"]:
            summary.append(f"\nrequires: pip install {' '.join(row['missing'])}", style="yellow")
        table.add_row(Text(str(row["reference"]), style="bold"), summary)
    output.print(table)


def strategies(
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            "-w",
            help="Workload to judge the strategies for (default: several typical ones).",
            show_default=False,
        ),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """List the strategies and their choices, and state which choices cannot be tried here and why."""
    from steptune.service.probing import look_here

    check_platform()
    with errors.status("inspecting this machine"):
        environment, workloads = look_here(workload, device)
    rows = [_row(strategy, environment, workloads) for strategy in _strategies(workloads)]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        _print_strategy(row)
    output.print(
        f"strategies judged for {environment.hardware.label} and {' or '.join(facts.name for facts in workloads)}",
        style="dim",
        markup=False,
    )


def _strategies(workloads: Sequence[WorkloadFacts]) -> tuple[Strategy, ...]:
    """Return all strategies, including the knobs of the workload if one was named."""
    return with_knobs(STRATEGIES, workloads[0]) if len(workloads) == 1 else STRATEGIES


def _print_strategy(row: dict[str, Any]) -> None:
    """Print a strategy as a paragraph: labels of choices are too long for the columns of a table of 80 characters."""
    output.print(Text(row["name"], style="bold").append(f"  {row['summary']}", style="not bold"))
    for numerics, labels in _grouped(row["choices"], "numerics"):
        output.print(
            Padding(Text(f"{numerics}: ", style="green").append(labels, style="default"), (0, 0, 0, 4), expand=False)
        )
    for reason, labels in _grouped(row["unsupported"], "reason"):
        output.print(Padding(Text(f"not available here, {reason}: {labels}", style="dim"), (0, 0, 0, 4), expand=False))
    output.print()


def _grouped(choices: list[dict[str, Any]], by: str) -> list[tuple[str, str]]:
    labels: dict[str, list[str]] = {}
    for choice in choices:
        labels.setdefault(choice[by], []).append(choice_label(choice["choice"]))
    return [(key, "; ".join(values)) for key, values in labels.items()]


def _row(strategy: Strategy, environment: Environment, workloads: Sequence[WorkloadFacts]) -> dict[str, Any]:
    """Return one strategy as a row; a choice is legal here if it is legal for one of the workloads."""
    legal: dict[str, dict[str, Any]] = {}
    refused: dict[str, dict[str, Any]] = {}
    for facts in workloads:
        for choice in strategy.choices(environment, facts):
            difference = strategy.difference(choice, facts)
            if not difference:
                continue
            label, entry = choice_label(difference), {"choice": difference, "numerics": strategy.numerics(choice).value}
            support = strategy.supports(choice, environment, facts)
            if isinstance(support, Unsupported):
                refused.setdefault(label, {**entry, "reason": support.reason})
            else:
                legal.setdefault(label, entry)
    return {
        "name": strategy.name,
        "summary": strategy.summary,
        "neutral": strategy.neutral(workloads[0]),
        "choices": list(legal.values()),
        "unsupported": [entry for label, entry in refused.items() if label not in legal],
    }
