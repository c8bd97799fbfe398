"""Commands that take another command after `--`, exactly as the user types it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from steptune.service.cli.console import say
from steptune.service.secret_names import secret_in
from steptune.tuner.errors import ChoiceError

NOT_PROFILED = 3
"""Exit status where the command succeeded, but no steps of it could be recorded."""
COMMAND = "steptune.command"
"""Key in a context under which the arguments after `--` are stored."""


class CommandOrWorkload(TyperCommand):
    """A Typer command that takes another command after `--`, unparsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove everything after the first `--` from the arguments, and store it."""
        if "--" in args:
            position = args.index("--")
            ctx.meta[COMMAND] = tuple(args[position + 1 :])
            args = args[:position]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def require_workload(workload: str | None, verb: str) -> str:
    """Return the workload that was given to a command without a training command after `--`; refuse the call if there
    is none.

    Args:
        verb: Activity of the command, for the refusal.

    Raises:
        ChoiceError: None was given.
    """
    if workload is None:
        raise ChoiceError(f"nothing to {verb}: name a workload, or a command after `--`")
    return workload


def check_command(command: Sequence[str], workload: str | None, verb: str) -> None:
    """Check a command after `--`.

    Args:
        workload: Workload that was given as well, if any.
        verb: Activity of the command that takes it, for the refusal.

    Raises:
        ChoiceError: The command is empty, or a workload was given as well.
    """
    if not command:
        raise ChoiceError("no command after `--`: write the training command there, like `-- python train.py`")
    if workload is not None:
        raise ChoiceError(f"both the workload {workload} and a command after `--` are given: {verb} one of them")


def refuse_secrets(command: Sequence[str]) -> None:
    """Refuse a command if the name of an argument suggests a secret: the study, its report and its exports show the
    command.

    Raises:
        ChoiceError: There is such an argument; the message names it, without its value.
    """
    name = secret_in(command)
    if name is not None:
        raise ChoiceError(
            f"{name} looks like a secret, but everyone who can see a study can see its command: pass the value to the "
            "script in an "
            "environment variable or a file"
        )


def refuse_options(context: typer.Context, names: Sequence[str], what: str = "workloads") -> None:
    """Refuse the named options, which apply only to `what` (workloads or scripts).

    Raises:
        ChoiceError: One of them was given.
    """
    given = [name for name in names if _was_given(context, name)]
    if given:
        option = "--" + given[0].replace("_", "-")
        way = "for a command, use its own arguments" if what == "workloads" else "for a workload, leave it out"
        raise ChoiceError(f"{option} is for {what} only: {way}")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def name_links_out() -> None:
    """Print a warning that names the symbolic links out of the current folder: through these links, a script writes to
    the user's real files.
    """
    from steptune.tuner.scripts.launch import find_links_out

    links = find_links_out(Path.cwd())
    if links:
        say(f"the script writes to real files through links that lead out of this folder: {', '.join(links)}")
