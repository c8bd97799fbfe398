"""`db`: the database's schema, housekeeping and backups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steptune.dashboards import units
from steptune.service.artifacts import open_artifacts
from steptune.service.backups import back_up
from steptune.service.backups import restore as restore_backup
from steptune.service.cli.console import output, print_json, say, settings_with
from steptune.service.cli.options import AsJson, Database
from steptune.service.connections import without_password
from steptune.service.database import known_revisions, migrate, open_engine
from steptune.service.housekeeping import keep_house
from steptune.service.permissions import keep_private, mend

BackupFile = Annotated[Path, typer.Argument(help="File of the backup.", metavar="FILE")]

app = typer.Typer(help="Manage the database and the files that its rows refer to.", no_args_is_help=True)


@app.command()
def upgrade(database: Database = None, as_json: AsJson = False) -> None:
    """Upgrade the database to this version's schema, or create the tables in an empty one."""
    settings = settings_with(database)
    mend(settings)  # files that earlier versions left open to others
    before, now = migrate(settings.database_url), known_revisions()[0]
    if as_json:
        print_json({"database": without_password(settings.database_url), "upgraded": True, "from": before, "to": now})
    elif before == now:
        output.print(f"the database already has this version's schema (revision {now})")
    else:
        done = f"upgraded the database from revision {before}" if before else "created the database"
        output.print(f"{done}; it now has this version's schema (revision {now})")


@app.command()
def gc(database: Database = None, as_json: AsJson = False) -> None:
    """Remove what has expired: unreferenced files, traces beyond quotas, old keys, sessions and audit entries.

    Workers of a service do it by themselves.
    """
    settings = settings_with(database)
    keep_private(settings)
    engine = open_engine(settings.database_url)
    try:
        report = keep_house(engine, open_artifacts(settings), settings)
    finally:
        engine.dispose()
    if as_json:
        print_json(report)
        return
    output.print(
        f"removed {units.counted(report.num_files, 'file')} ({units.memory(report.size_bytes)}), and "
        f"{units.counted(report.num_traces, 'trace')} beyond a quota"
    )


@app.command()
def backup(
    path: BackupFile,
    without_artifacts: Annotated[
        bool, typer.Option("--without-artifacts", help="Back up the rows only, without traces and uploads.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Back up the database and its files to FILE, as they are at one moment; the service may keep running."""
    settings = settings_with(database)
    artifacts = None if without_artifacts else open_artifacts(settings)
    report = back_up(settings.database_url, artifacts, path, force=force)
    if as_json:
        print_json(report)
        return
    files = units.counted(report.num_artifacts, "file")
    output.print(f"{path}  the database and {files}, {units.memory(report.size_bytes)}", soft_wrap=True, markup=False)
    if report.num_missing:
        say(
            f"the backup lacks {units.counted(report.num_missing, 'file')} that database rows refer to: "
            "not found in the storage of the service",
            style="yellow",
        )


@app.command()
def restore(
    path: BackupFile,
    force: Annotated[bool, typer.Option("--force", help="Replace the contents of the database.")] = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Restore a backup; stop servers and workers first, and restore only files that you trust."""
    settings = settings_with(database)
    report = restore_backup(settings.database_url, open_artifacts(settings), path, force=force)
    if as_json:
        print_json(report)
        return
    output.print(f"restored the database and {units.counted(report.num_artifacts, 'file')}")
    if not report.is_current:
        say(f"the restored schema is revision {report.revision}: run `steptune db upgrade` next", style="yellow")
