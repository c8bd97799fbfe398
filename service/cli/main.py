"""The `steptune` command: what every command shares, and how errors are shown."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer
from rich.text import Text

from steptune._version import __version__
from steptune.service.cli import (
    analyze,
    catalogue,
    compare,
    database,
    delete,
    diagnose,
    inspect_study,
    predict,
    queue,
    report,
    serve,
    submit,
    token,
    tune,
    user,
    verify,
    watch,
    worker,
)
from steptune.service.cli.console import INTERRUPTED, errors, say
from steptune.tuner.errors import SteptuneError

USER_ERROR = 2

app = typer.Typer(
    name="steptune",
    help="Finds the fastest way to run one training step of a PyTorch model on this machine, and proves it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
tune.register(app)
inspect_study.register(app)
verify.register(app)
catalogue.register(app)
diagnose.register(app)
analyze.register(app)
compare.register(app)
predict.register(app)
report.register(app)
serve.register(app)
worker.register(app)
submit.register(app)
watch.register(app)
queue.register(app)
delete.register(app)
app.add_typer(database.app, name="db")
app.add_typer(token.app, name="token")
app.add_typer(user.app, name="user")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    if version:
        typer.echo(f"steptune {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; errors for people are one message and status 2, with a traceback under `--debug`."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        app(prog_name="steptune")
    except SteptuneError as error:
        if debug:
            traceback.print_exc()
        errors.print(
            Text("error: ", style="bold red").append(str(error), style="default not bold"),
            soft_wrap=not errors.is_terminal,
        )
        for note in getattr(error, "__notes__", ()) if debug else ():
            say(note)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
