"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from steptune.dashboards import units
from steptune.dashboards.roofline import RooflineInfo
from steptune.tuner.trace_records import ModuleStats

PATH_WIDTH = 42
"""Maximum width of a module's path, in characters, so that its table fits on a terminal of 80 columns."""


def plain_table(*names: str, title: str | None = None) -> Table:
    """Return a table without lines. Columns that must not wrap on a narrow terminal need `no_wrap`."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
        title=title,
        title_justify="left",
        title_style="bold",
    )
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def modules_table(modules: Sequence[ModuleStats], num_steps: int, title: str) -> Table:
    """Return a table of modules with their times per step: forward, backward, and without submodules."""
    table = plain_table("forward", "backward", "own", "calls", "module", title=title)
    for column in table.columns[:-1]:
        column.no_wrap, column.justify = True, "right"
    for module in modules:
        times = (module.forward_ns, module.backward_ns, module.own_ns)
        count = units.significant(module.count / num_steps)
        name = Text(units.end_of_path(module.name, PATH_WIDTH), no_wrap=True, overflow="ellipsis")
        table.add_row(*(units.short_time(one / num_steps) for one in times), count, name)
    return table


def roofline_tables(roofline: RooflineInfo, of: str) -> Iterable[RenderableType]:
    """Yield tables of operators, kernels and modules, sorted by time above the floor (least possible time), and a note
    that explains floors.
    """
    for kind, rows in roofline.tables:
        title = f"{kind.capitalize()} by time above the roofline{of}"
        replayed = ("saves",) if any(row.saved is not None for row in rows) else ()
        names = ("above", "time", "floor", "reached", "limit", "calls", *replayed, kind.removesuffix("s"))
        table = plain_table(*names, title=title)
        for column in table.columns[:-1]:
            column.no_wrap, column.justify = True, "right"
        for row in rows:
            name = Text(row.name, no_wrap=True, overflow="ellipsis")
            for place in (row.shapes, row.module):
                name.append(f"  {place}" if place else "", style="dim")
            times = (units.short_time(one) for one in (row.above_ns, row.time_ns, row.floor_ns))
            saved = ("" if row.saved is None else units.percent(row.saved),) if replayed else ()
            table.add_row(*times, units.percent(row.reached), row.limit, units.significant(row.calls), *saved, name)
        yield table
    title = "" if roofline.tables else f"Roofline{of}: "
    yield Text(title).append(roofline.note, style="dim")
