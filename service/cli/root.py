"""Options of the `steptune` command itself."""

from __future__ import annotations

from typing import Annotated

import typer

from steptune._version import __version__


def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Print the version if asked for it."""
    if version:
        typer.echo(f"steptune {__version__}")
        raise typer.Exit
