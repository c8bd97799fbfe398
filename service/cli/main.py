"""The `steptune` command: parts shared by all commands, and the display of errors."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from steptune.service.cli.console import INTERRUPTED, errors, say
from steptune.tuner.errors import SteptuneError

if TYPE_CHECKING:
    import typer

USER_ERROR = 2

MODULES = {
    "tune": ("tune", "resume"),
    "inspect_study": ("show", "list", "export"),
    "verify": ("verify",),
    "catalogue": ("zoo", "strategies"),
    "diagnose": ("profile", "doctor"),
    "analyze": ("analyze",),
    "compare": ("compare",),
    "predict": ("predict",),
    "report": ("report",),
    "serve": ("serve",),
    "worker": ("worker",),
    "submit": ("submit",),
    "watch": ("watch",),
    "queue": ("studies", "cancel", "pause", "continue"),
    "delete": ("delete",),
}
"""Modules of this package, in the order of `--help`, with the commands that each registers."""
GROUPS = {"database": "db", "token": "token", "user": "user"}
"""Modules whose commands form a group, with the name of the group."""


def application(wanted: str | None = None) -> typer.Typer:
    """Return the application with every command, or only with the commands of the module that defines the wanted
    command.

    To run one command, only its module is loaded: all of them take longer to load than a small trace to analyse.

    Args:
        wanted: Name of the command or group; a name that no module has loads all, so that it is answered with them,
            but for `--version`, which needs none.
    """
    import typer

    from steptune.service.cli.root import root

    app = typer.Typer(
        name="steptune",
        help="Finds the fastest way to run one training step of a PyTorch model on this machine, and proves it.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(root)
    names = {**MODULES, **{module: (group,) for module, group in GROUPS.items()}}
    chosen = [module for module, commands in names.items() if wanted in commands]
    for module in chosen or ([] if wanted == "--version" else names):
        commands = importlib.import_module(f"steptune.service.cli.{module}")
        if module in GROUPS:
            app.add_typer(commands.app, name=GROUPS[module])
        else:
            commands.register(app)
    return app


def _run(arguments: Sequence[str]) -> None:
    """Run the command. `analyze` without options skips the command-line parser, whose import costs time and memory that
    a small trace does not need.
    """
    command, rest = (arguments[0], arguments[1:]) if arguments else (None, ())
    if command == "analyze" and rest and not any(argument.startswith("-") for argument in rest):
        from steptune.service.cli.analysed import show_analysis

        show_analysis(rest)
        sys.exit()
    application(None if command == "--version" and rest else command)(prog_name="steptune")  # exits, too


def main() -> None:
    """Run the command; expected errors are shown as one message with status 2, with a traceback under `--debug`."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        _run(sys.argv[1:])
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
