"""Shared parts of the commands `token` and `user`. The commands use the database directly, because a user who can read
it may do anything.
"""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

import typer

from steptune.service.access.authentication import Access
from steptune.service.cli.console import settings_with
from steptune.service.database import open_engine

DEFAULT_SCOPES = "read submit"
UserName = Annotated[str, typer.Argument(help="Name of the user.", metavar="USER", show_default=False)]
Scopes = Annotated[
    str, typer.Option("--scopes", help="Scopes, separated by spaces or commas: read, submit, worker, admin.")
]


@contextmanager
def opened_access(database: str | None) -> Iterator[Access]:
    """Open access control on the database that the settings name, and close it at the end."""
    settings = settings_with(database)
    engine = open_engine(settings.database_url)
    try:
        yield Access(engine, settings)
    finally:
        engine.dispose()


def record(access: Access, action: str, target: str, **detail: object) -> None:
    """Record in the audit log an action at the command line, with the name of the operating system's user."""
    access.audit.record(
        None, action=action, target=target, outcome="done", detail={"system_user": _system_user(), **detail}
    )


def shown_time(time: datetime | None) -> str:
    return "never" if time is None else f"{time.astimezone():%Y-%m-%d %H:%M}"


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number without a name
        return "unknown"
