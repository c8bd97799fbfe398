"""Output of commands: results to standard output, everything else to standard error."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from steptune.service.tables import plain_table

if TYPE_CHECKING:
    from steptune.service.settings import Settings
    from steptune.service.store import SqlStudyStore

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended without a result, as in shells."""

output = Console(highlight=False, soft_wrap=False)
errors = Console(stderr=True, highlight=False)


def say(text: str, style: str | None = None) -> None:
    """Print one line to standard error, unformatted: a terminal wraps it between words, a file gets it as one line."""
    errors.print(text, style=style, markup=False, soft_wrap=not errors.is_terminal)


def short_name(workload: str) -> str:
    """Return a workload's reference without the folders of its file."""
    from steptune.tuner.workloads.reference import COMMAND, is_command

    if is_command(workload):
        return workload.removeprefix(COMMAND)
    return workload if workload.startswith("zoo:") else workload.rpartition("/")[2]


def studies_table(last: str, rows: Iterable[tuple[str, str, Text]]) -> Table:
    """Return a table of studies. Ids and times of creation are always shown whole; other columns are cut to the
    terminal's width.

    Args:
        last: Heading of the column of texts.
    """
    table = plain_table("study", "started", last)
    for column in table.columns[:2]:
        column.no_wrap = True
    for study_id, created_at, text in rows:
        text.no_wrap, text.overflow = True, "ellipsis"
        table.add_row(study_id, f"{datetime.fromisoformat(created_at).astimezone():%Y-%m-%d %H:%M}", text)
    return table


def print_json(value: Any) -> None:
    """Print one JSON document to standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def settings_with(database: str | None, isolation: str | None = None) -> Settings:
    """Return the settings; options given on the command line take precedence."""
    from steptune.service.settings import load_settings

    given = {"database_url": database, "isolation": isolation}
    return load_settings(**{name: value for name, value in given.items() if value})


def database_option(database: str | None) -> str:
    """Return ` --database URL` for a command suggested to the user, without a password; empty where none was given."""
    from steptune.service.connections import without_password

    return f" --database {shlex.quote(without_password(database))}" if database else ""


@contextmanager
def opened_store(settings: Settings) -> Iterator[SqlStudyStore]:
    """Open the store that the settings name, and close it at the end."""
    from steptune.service.database import open_store

    store = open_store(settings.database_url)
    try:
        yield store
    finally:
        store.close()
