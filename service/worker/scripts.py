"""Submitted scripts on a worker: inspected once, and then tuned as `steptune tune -- COMMAND` does."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from steptune.service.isolation import Level
from steptune.service.queue.claiming import runs_scripts
from steptune.service.script_profile import refusal_of
from steptune.service.script_source import check_packages, interpreter_of, link_data, read_manifest
from steptune.service.script_study import LEAST_BUDGET_S, choices_of, refuse_sharded, why_nothing
from steptune.tuner.errors import IsolationUnavailableError, WorkloadError
from steptune.tuner.objectives import check_device, parse_objective
from steptune.tuner.records import Study
from steptune.tuner.scripts.look import Look, look_at
from steptune.tuner.scripts.runner import ScriptRunner

LAST_LINES = 3


def prepare_script(
    study: Study, folder: Path, level: Level, check: Callable[[], None], python: str = sys.executable
) -> tuple[Study, ScriptRunner]:
    """Inspect a submitted script.

    Args:
        folder: Folder of its sources, as they were sent.
        check: Called while the script runs; an exception ends it.
        python: The worker's interpreter: `python` in a command is that one.

    Returns:
        The study with the script's facts, and the runner of its trials, which the caller closes.

    Raises:
        IsolationUnavailableError: Trials are isolated here.
        WorkloadError: The worker lacks a package or data, or the script cannot be tuned.
    """
    if not runs_scripts(level.name):
        raise IsolationUnavailableError(
            f"scripts run in a copy-on-write mount of their folder, which isolation {level.name} forbids: start "
            "a worker with --isolation none"
        )
    manifest = read_manifest(folder)
    path = os.pathsep.join(filter(None, (str(Path(python).parent), os.environ.get("PATH"))))
    variables = {**manifest.variables, "PATH": path}
    check_packages(manifest, interpreter_of(manifest.command, path))
    link_data(manifest, folder)
    look = _looked_at(manifest.command, study, folder, variables, check)
    with contextlib.ExitStack() as unused:
        unused.callback(look.close)
        found = _as_looked_at(study, look, variables, check)
        unused.pop_all()
    return found


def _as_looked_at(
    study: Study, look: Look, variables: dict[str, str], check: Callable[[], None]
) -> tuple[Study, ScriptRunner]:
    settings = study.settings
    if look.record.num_ranks != settings.num_ranks:
        raise WorkloadError(
            f"the command trains on {look.record.num_ranks} ranks, but {settings.num_ranks} were requested: "
            f"submit it with --ranks {look.record.num_ranks}"
        )
    refuse_sharded(look)
    check_device(parse_objective(settings.objective), look.record.device)
    left_s = max(LEAST_BUDGET_S, settings.budget_s - look.seconds)
    study = replace(study, settings=replace(settings, budget_s=left_s, device=look.record.device), facts=look.facts)
    runner = ScriptRunner(look, Path(study.directory), seed=settings.seed, variables=variables, check=check)
    choices = choices_of(runner, study)
    if not choices.tried:
        raise WorkloadError(why_nothing(choices))
    return study, runner


def _looked_at(
    command: tuple[str, ...], study: Study, folder: Path, variables: dict[str, str], check: Callable[[], None]
) -> Look:
    log = Path(study.directory) / "look.log"
    longest_s, seed = study.settings.budget_s, study.settings.seed
    look, ended = look_at(command, folder, log, variables, frozen_seed=seed, longest_s=longest_s, check=check)
    if look is not None:
        return look
    if ended.timed_out:
        raise WorkloadError("the budget ended before the steps of the script were recorded: give a larger budget")
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = f". Its last output: {' / '.join(lines[-LAST_LINES:])}" if lines else ""
    raise WorkloadError(f"no steps were recorded: {refusal_of(ended)}{said}")
