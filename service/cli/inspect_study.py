"""`show`, `list`, `export`: results of studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from steptune.service.cli.console import (
    opened_store,
    output,
    print_json,
    settings_with,
    short_name,
    studies_table,
)
from steptune.service.cli.options import AsJson, Database, StudyId
from steptune.service.cli.remote import Token, TokenFile, Url, connected, study_id_of
from steptune.service.store import SqlStudyStore
from steptune.service.tables import plain_table
from steptune.tuner.errors import RecommendationError, StudyNotFoundError
from steptune.tuner.records import Recommendation, Study, StudyState, Verdict


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(show)
    app.command("list")(list_studies)
    app.command()(export)


def resolve(store: SqlStudyStore, study_id: str) -> Study:
    """Return the study with an id, or the only study with an id that begins or ends with this text; `last` is the
    newest study.
    """
    if study_id != "last":
        return store.get_study(study_id)
    newest = store.list_studies(limit=1)
    if not newest:
        raise StudyNotFoundError("there is no study yet: start one with `steptune tune WORKLOAD`")
    return newest[0]


def show(
    study_id: StudyId = "last",
    everything: Annotated[
        bool, typer.Option("--all", help="Also print the breakdown, all trials, and the untried choices with reasons.")
    ] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Print only the plan of the recommendation: its steps in order, each with the strategy behind it.",
        ),
    ] = False,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Print a study's answer: what to change, how to use it, what to do next."""
    with opened_store(settings_with(database)) as store:
        study = resolve(store, study_id)
        recommendation = store.recommendation(study.study_id)
        if plan:
            _print_plan(study, recommendation, as_json=as_json)
        elif as_json:
            decisions = store.decisions(study.study_id)
            print_json({"study": study, "recommendation": recommendation, "decisions": decisions})
        elif everything:
            from steptune.service.cli.summary import print_summary

            print_summary(output, store, study.study_id)
        else:
            from steptune.service.cli.answer import print_answer

            print_answer(output, store, study.study_id, database=database)


def _print_plan(study: Study, recommendation: Recommendation | None, *, as_json: bool) -> None:
    from steptune.tuner.strategies.planned import planned_steps

    if recommendation is None:
        raise RecommendationError(
            f"a plan requires an answer, but study {study.study_id} has none: continue it with "
            f"`steptune resume {study.study_id}`"
        )
    if recommendation.in_script is not None:
        raise RecommendationError(
            f"only a workload has a plan, but study {study.study_id} tuned a script: write its changes with "
            f"`steptune export {study.study_id} --format diff`"
        )
    steps = planned_steps(recommendation.choices)
    if as_json:
        print_json({"plan": steps})
        return
    table = plain_table("stage", "what", "required by")
    for step in steps:
        table.add_row(step.stage, step.does, step.strategy)
    output.print(table if steps else "the plan has no steps: the recommendation is plain PyTorch")


def list_studies(
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of studies, newest first.")] = 20,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """List studies, the newest first."""
    with opened_store(settings_with(database)) as store:
        rows = [(study, store.recommendation(study.study_id)) for study in store.list_studies(limit)]
    if as_json:
        print_json([{"study": study, "recommendation": recommendation} for study, recommendation in rows])
        return
    if not rows:
        output.print("no study yet: start one with `steptune tune WORKLOAD`")
        return
    shown = ((study.study_id, study.created_at, _answer(study, recommendation)) for study, recommendation in rows)
    output.print(studies_table("answer", shown))


def _answer(study: Study, recommendation: Recommendation | None) -> Text:
    """Return two lines about a study: the result, and the workload."""
    from steptune.dashboards import units

    hardware = study.environment.hardware.label if study.environment else ""
    about = ", ".join(part for part in (short_name(study.workload), hardware) if part)
    if recommendation is None:
        text = f"{study.state.value}: {study.message}" if study.message else study.state.value
    elif recommendation.gain is None or recommendation.verdict is not Verdict.FASTER:
        text = units.words(recommendation.verdict.value)
    else:
        text = f"{units.ratio(recommendation.gain.ratio)} ({units.ratio_interval(recommendation.gain.interval)})"
    if recommendation is not None and study.state is not StudyState.COMPLETED:
        text = f"{study.state.value}, {text}"
    return Text(text).append(f"\n{about}", style="dim")


def export(
    study_id: StudyId = "last",
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help="Write only this format: json, yaml, python, torchrun, accelerate, accelerate_fsdp1, "
            "accelerate_python, transformers, lightning, deepspeed, torchtitan; diff for a script; csv, parquet or "
            "optuna for the whole study.",
            show_default=False,
        ),
    ] = None,
    trial: Annotated[
        str | None,
        typer.Option(
            "--trial",
            help="Number or id of a trial to export instead of the recommended configuration.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--output", "-o", help="Folder, file (for one format), or `-` for standard output.")
    ] = Path(),
    database: Database = None,
    url: Url = None,
    token: Token = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Export a study's recommendation to the formats of other tools; by default to all that can express it, with the
    report.

    With --url, export a study of a service, without the report.
    """
    from steptune.service.artifacts import open_artifacts
    from steptune.service.cli.exporting import DIFF, export_local, export_remote
    from steptune.service.trial_source import KeptTrials
    from steptune.tuner.export.study_formats import study_format

    if url and database is None:
        with connected(url, token, token_file) as client:
            export_remote(client, study_id_of(client, study_id), format_, folder, trial=trial, as_json=as_json)
        return
    if format_ not in (None, DIFF):
        study_format(format_)  # refused before anything is opened
    settings = settings_with(database)
    with opened_store(settings) as store:
        pages = KeptTrials(store, open_artifacts(settings))
        export_local(pages, resolve(store, study_id), format_, folder, trial=trial, as_json=as_json)
