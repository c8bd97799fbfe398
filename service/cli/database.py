"""`db`: the database's schema."""

from __future__ import annotations

import typer

from service.cli.console import output, print_json, settings_with
from service.cli.options import AsJson, Database
from service.database import migrate

app = typer.Typer(help="The database.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `upgrade` a command of its own while it is the only one."""


@app.command()
def upgrade(database: Database = None, as_json: AsJson = False) -> None:
    """Bring the database to this version's schema; makes it where there is none."""
    settings = settings_with(database)
    migrate(settings.database_url)
    if as_json:
        print_json({"database": settings.database_url, "upgraded": True})
    else:
        output.print("the database has this version's schema")
