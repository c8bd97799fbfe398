"""`db`: the database's schema."""

from __future__ import annotations

import typer

from dashboards import units
from service.artifacts import open_artifacts
from service.cli.console import output, print_json, settings_with
from service.cli.options import AsJson, Database
from service.database import checked_engine, migrate
from service.housekeeping import keep_house

app = typer.Typer(help="The database, and the files that its rows refer to.", no_args_is_help=True)


@app.command()
def upgrade(database: Database = None, as_json: AsJson = False) -> None:
    """Bring the database to this version's schema; makes it where there is none."""
    settings = settings_with(database)
    migrate(settings.database_url)
    if as_json:
        print_json({"database": settings.database_url, "upgraded": True})
    else:
        output.print("the database has this version's schema")


@app.command()
def gc(database: Database = None, as_json: AsJson = False) -> None:
    """Remove what is expired: files nobody refers to, traces beyond quotas, old keys, sessions and audit entries.

    Workers of a service do it by themselves.
    """
    settings = settings_with(database)
    with checked_engine(settings.database_url) as engine:
        report = keep_house(engine, open_artifacts(settings), settings)
    if as_json:
        print_json(report)
        return
    output.print(
        f"{report.num_files} files removed, {units.memory(report.size_bytes)}; {report.num_traces} traces given up"
    )
