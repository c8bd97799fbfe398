"""Inspection of a script's command, for the `steptune` commands that use its result."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from steptune.service.cli.commands import NOT_PROFILED
from steptune.service.cli.console import errors, say

if TYPE_CHECKING:
    from steptune.tuner.scripts.look import Look


def look_of(
    command: tuple[str, ...],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    frozen_seed: int | None = None,
) -> Look:
    """Inspect a command; if that fails, show the script's output unchanged.

    Args:
        frozen_seed: Seed of trials that start from a frozen copy, until the inspection is closed.

    Raises:
        typer.Exit: The steps of the command could not be recorded.
    """
    from steptune.service.script_profile import refusal_of
    from steptune.tuner.scripts.look import look_at

    with tempfile.TemporaryDirectory(prefix="steptune-look-") as temporary:
        log = Path(temporary) / "log"
        with errors.status("inspecting the script"):
            look, ended = look_at(command, folder, log, variables, frozen_seed=frozen_seed)
        if look is not None:
            return look
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
    say(f"no steps were recorded: {refusal_of(ended)}", style="yellow")
    raise typer.Exit(ended.status or NOT_PROFILED)
