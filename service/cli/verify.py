"""`verify`: comparison of a study's recommendation with today's settings, in a longer training or in the user's own
script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape

from steptune.service.cli.commands import COMMAND, CommandOrWorkload, check_command, refuse_options
from steptune.service.cli.console import INTERRUPTED, errors, opened_store, output, print_json, say, settings_with
from steptune.service.cli.inspect_study import resolve
from steptune.service.cli.options import AsJson, Database, Isolation, Python, StudyId
from steptune.service.cli.scripts import look_of
from steptune.service.store import SqlStudyStore
from steptune.tuner.errors import ChoiceError
from steptune.tuner.hardware import check_platform
from steptune.tuner.records import MeasureSettings, Recommendation, Study, TrialResult
from steptune.tuner.workloads.reference import command_of, is_command

if TYPE_CHECKING:
    from steptune.tuner.scripts.look import Look
    from steptune.tuner.scripts.verification import Changed

OF_SCRIPTS = ("by", "edited", "blocks")
OF_WORKLOADS = ("steps", "python", "isolation")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=CommandOrWorkload)(verify)


def verify(
    context: typer.Context,
    study_id: StudyId = "last",
    steps: Annotated[int, typer.Option(min=2, help="Number of steps to train with each configuration.")] = 100,
    by: Annotated[
        str, typer.Option(help="For a script: apply the changes by `enable`, or by the `diff` that `export` writes.")
    ] = "enable",
    edited: Annotated[
        Path | None,
        typer.Option(
            help="For a script: path of an edited copy, compared with the original in place of a study's answer.",
            show_default=False,
        ),
    ] = None,
    blocks: Annotated[int, typer.Option(min=2, help="For a script: number of runs of each version.")] = 4,
    database: Database = None,
    python: Python = None,
    isolation: Isolation = None,
    as_json: AsJson = False,
) -> None:
    """Run a study's recommendation and today's settings side by side, and compare their losses; for a script, also
    compare their speeds.

    Write a script's command after `--`, as it was tuned: `steptune verify -- python train.py --lr 1e-3`.
    """
    command: tuple[str, ...] | None = context.meta.get(COMMAND)
    if command is not None:
        check_command(command, None, "verify")
    if edited is not None and command is None:
        raise ChoiceError("--edited requires a command: write it after `--`")
    check_platform()
    settings = settings_with(database, isolation)
    with opened_store(settings) as store:
        study = None if edited is not None else _study(store, study_id, command)
        if study is not None and not is_command(study.workload):
            refuse_options(context, OF_SCRIPTS, "scripts")
            same = _verify_workload(store, study, steps, python, isolation, as_json=as_json, database=database)
        else:
            refuse_options(context, OF_WORKLOADS)
            same = _verify_script(store, study, command, by, edited, blocks, as_json=as_json)
    if not same:
        raise typer.Exit(1)


def _study(store: SqlStudyStore, study_id: str, command: tuple[str, ...] | None) -> Study:
    if command is None or study_id != "last":
        return resolve(store, study_id)
    from steptune.service.script_verification import study_of_command

    return study_of_command(store, command, Path.cwd())


def _verify_workload(
    store: SqlStudyStore,
    study: Study,
    steps: int,
    python: Path | None,
    isolation: str | None,
    *,
    as_json: bool,
    database: str | None,
) -> bool:
    from steptune.service.script_verification import recommendation_of
    from steptune.service.verification import print_verification, verify_study

    recommendation = recommendation_of(store, study)
    if recommendation.candidate.is_baseline:
        errors.print("The recommendation is today's configuration, so two runs of it are compared.")
    with errors.status("training") as status:
        verification = verify_study(
            study,
            recommendation,
            steps,
            settings_with(database, isolation),
            lambda p: status.update(escape(p.text)),
            python=str(python) if python else None,
        )
    if as_json:
        print_json(verification)
    else:
        print_verification(output, verification)
    return verification.same


def _verify_script(
    store: SqlStudyStore,
    study: Study | None,
    command: tuple[str, ...] | None,
    by: str,
    edited: Path | None,
    blocks: int,
    *,
    as_json: bool,
) -> bool:
    from steptune.service.interrupts import interruptible
    from steptune.service.script_study import script_of
    from steptune.service.script_verification import (
        changed_by,
        changed_file,
        print_script_verification,
        recommendation_of,
        verified,
        with_claim,
    )
    from steptune.tuner.scripts.verification import UNCHANGED

    recommendation: Recommendation | None = None
    folder = Path.cwd()
    if study is not None:
        recommendation, folder = recommendation_of(store, study), Path(script_of(study).folder)
        command = command or command_of(study.workload)
    assert command is not None, "a study or a command must be given"
    way: AbstractContextManager[Changed]
    if edited is not None:
        way = nullcontext(changed_file(edited, command, folder))
    else:
        assert recommendation is not None, "an edited file or a study must be given"
        way = changed_by(recommendation, by, command)
    settings = MeasureSettings() if study is None else study.settings.measure
    try:
        with interruptible(), way as changed:
            look = look_of(command, folder, UNCHANGED, frozen_seed=0)
            with closing(look), errors.status("starting") as status:
                found = verified(
                    look, changed, num_blocks=blocks, settings=settings, say=lambda text: status.update(escape(text))
                )
    except KeyboardInterrupt:
        say("interrupted: nothing was compared")
        raise typer.Exit(INTERRUPTED) from None
    found = with_claim(found, recommendation)
    if as_json:
        print_json(found)
    else:
        print_script_verification(output, found, recommendation)
    return found.same


def verify_answer(
    look: Look,
    recommendation: Recommendation,
    settings: MeasureSettings,
    earlier: Mapping[str, Sequence[TrialResult]],
    longest_s: float,
    target: Path,
    *,
    is_silent: bool,
) -> None:
    """Verify a study's answer in its script by the study's own inspection, and write the result as JSON.

    Args:
        earlier: Good results of the study by candidate key, for the scatter of runs.
        longest_s: Seconds after which no further runs begin, once there are enough for an interval.
        is_silent: Whether nothing is printed.

    Raises:
        typer.Exit: The losses differ.
    """
    from steptune.service.interrupts import interruptible
    from steptune.service.script_verification import changed_by, print_script_verification, verified, with_claim
    from steptune.tuner.search.confirmation import MAX_BLOCKS

    if recommendation.candidate.is_baseline or recommendation.in_script is None:
        say("the recommendation changes nothing in the script: there is nothing to verify", style="dim")
        return
    with (
        interruptible(),
        changed_by(recommendation, "enable", look.command) as changed,
        errors.status("starting") as status,
    ):
        found = verified(
            look,
            changed,
            num_blocks=MAX_BLOCKS,
            settings=settings,
            say=lambda text: status.update(escape(text)),
            longest_s=longest_s,
            earlier=earlier,
        )
    found = with_claim(found, recommendation)
    target.write_bytes(msgspec.json.encode(found))
    if not is_silent:
        print_script_verification(output, found, recommendation)
    if not found.same:
        raise typer.Exit(1)
