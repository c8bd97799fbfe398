"""The `steptune` command: what every command shares, and how errors are shown."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

import tuner
from service.cli import catalogue, database, diagnose, inspect_study, tune
from service.cli.console import errors
from tuner.errors import SteptuneError

USER_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="steptune",
    help="Finds the fastest way to run one training step of a PyTorch model on this machine, and proves it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
tune.register(app)
inspect_study.register(app)
catalogue.register(app)
diagnose.register(app)
app.add_typer(database.app, name="db")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    if version:
        typer.echo(f"steptune {tuner.__version__}")
        raise typer.Exit


def main() -> None:
    """Runs the command; errors for people are one message and status 2, with a traceback under `--debug`."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        app()
    except SteptuneError as error:
        if debug:
            traceback.print_exc()
        errors.print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False)
        for note in getattr(error, "__notes__", ()) if debug else ():
            errors.print(_plain(note), highlight=False)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(INTERRUPTED)


def _plain(text: str) -> str:
    """Text in which brackets are brackets, not markup."""
    return text.replace("[", "\\[")


if __name__ == "__main__":
    main()
