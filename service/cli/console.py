"""Where commands print: results to standard output, everything else to standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console

from service.database import open_store
from service.settings import Settings
from service.store import SqlStudyStore

output = Console(highlight=False, soft_wrap=False)
errors = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def settings_with(database: str | None) -> Settings:
    """The settings, with a database given on the command line."""
    settings = Settings()
    return settings.model_copy(update={"database_url": database}) if database else settings


@contextmanager
def opened_store(settings: Settings) -> Iterator[SqlStudyStore]:
    """The store of these settings, closed at the end."""
    store = open_store(settings.database_url)
    try:
        yield store
    finally:
        store.close()
