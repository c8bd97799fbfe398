"""`doctor --topology`: the links between ranks on this machine."""

from __future__ import annotations

import typer
from rich.markup import escape
from rich.text import Text

from steptune.dashboards import units
from steptune.dashboards.links import get_links_info
from steptune.service.cli.console import errors, opened_store, output, print_json, say, settings_with
from steptune.service.cli.network import MARKS
from steptune.service.probing import measure_links
from steptune.service.tables import plain_table
from steptune.tuner.network.finding import Level
from steptune.tuner.network.rank_order import examine_order
from steptune.tuner.records import Topology


def doctor_topology(
    *, num_ranks: int | None, device: str | None, database: str | None, remeasure: bool, as_json: bool
) -> None:
    """Measure the links, or check the known ones, and print them.

    Raises:
        typer.Exit: With status 1 where the order of the ranks slows communication.
    """
    with (
        opened_store(settings_with(database, None)) as store,
        errors.status("measuring the links between ranks") as status,
    ):
        topology = measure_links(
            store,
            device=device,
            num_ranks=num_ranks,
            remeasure=remeasure,
            listener=lambda progress: status.update(escape(progress.text)),
        )
    order = examine_order(topology.host_of_rank, topology.backend)
    if as_json:
        print_json({"topology": topology, "order": order})
    else:
        _print(topology)
        mark, style = MARKS[order.level]
        output.print(Text(f"{mark}  {order.subject}: {order.found}", style=style))
    if order.level is Level.PROBLEM:
        raise typer.Exit(1)


def _print(topology: Topology) -> None:
    info = get_links_info(topology)
    table = plain_table("link", "kind", "ranks", "one way", "a step", "a call", "error")
    for row in info.rows:
        table.add_row(
            row.name,
            row.kind,
            str(row.num_ranks),
            units.per_second(row.bytes_per_s, "B"),
            units.short_time(row.latency_ns),
            units.short_time(row.call_ns),
            units.percent(row.fit_residual),
        )
    output.print(table)
    say(f"{topology.backend}, {topology.num_ranks} ranks, measured {topology.measured_at}")
