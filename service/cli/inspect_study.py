"""`show`, `list`, `export`, `verify`: what is known of studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from service.cli.console import errors, opened_store, output, print_json, settings_with
from service.cli.options import AsJson, Database, Python, StudyId
from service.store import SqlStudyStore
from tuner.errors import StoreError, StudyNotFound
from tuner.records import Recommendation, Study


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(show)
    app.command("list")(list_studies)
    app.command()(export)
    app.command()(verify)


def resolve(store: SqlStudyStore, study_id: str) -> Study:
    """The study of an id, a part of one, or `last`."""
    if study_id != "last":
        return store.get_study(study_id)
    newest = store.list_studies(limit=1)
    if not newest:
        raise StudyNotFound("there is no study yet: `steptune tune WORKLOAD` makes one")
    return newest[0]


def show(study_id: StudyId = "last", database: Database = None, as_json: AsJson = False) -> None:
    """Print a study's answer, and how it was found."""
    with opened_store(settings_with(database)) as store:
        study = resolve(store, study_id)
        recommendation = store.recommendation(study.study_id)
        if as_json:
            decisions = store.decisions(study.study_id)
            print_json({"study": study, "recommendation": recommendation, "decisions": decisions})
            return
        from service.cli.summary import print_summary

        print_summary(output, store, study.study_id)


def list_studies(
    limit: Annotated[int, typer.Option(min=1, help="At most this many, the newest first.")] = 20,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """List studies, the newest first."""
    with opened_store(settings_with(database)) as store:
        rows = [(study, store.recommendation(study.study_id)) for study in store.list_studies(limit)]
    if as_json:
        print_json([{"study": study, "recommendation": recommendation} for study, recommendation in rows])
        return
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("study", "begun", "workload", "hardware", "state", "answer"):
        table.add_column(name, overflow="fold")
    for study, recommendation in rows:
        hardware = study.environment.hardware.label if study.environment else ""
        workload = study.facts.name if study.facts else study.workload.rpartition("/")[2]
        answer = _answer(recommendation) if recommendation else study.message
        table.add_row(
            study.study_id, study.created_at[:16].replace("T", " "), workload, hardware, study.state.value, Text(answer)
        )
    output.print(table if rows else "no study yet: `steptune tune WORKLOAD` makes one")


def _answer(recommendation: Recommendation) -> str:
    from dashboards import units

    if recommendation.gain is None or recommendation.verdict.value != "faster":
        return units.words(recommendation.verdict.value)
    return f"{units.ratio(recommendation.gain.ratio)} ({units.ratio_interval(recommendation.gain.interval)})"


def export(
    study_id: StudyId = "last",
    format_: Annotated[
        str | None, typer.Option("--format", "-f", help="json, yaml or python; default all.", show_default=False)
    ] = None,
    folder: Annotated[Path, typer.Option("--output", "-o", help="Folder, or `-` for standard output.")] = Path(),
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write a study's recommendation in a format that another tool reads."""
    from tuner.export import EXPORTERS, exporter_named

    chosen = [exporter_named(format_)] if format_ else list(EXPORTERS)
    with opened_store(settings_with(database)) as store:
        study = resolve(store, study_id)
        recommendation = store.recommendation(study.study_id)
    if recommendation is None:
        raise StoreError(
            f"study {study.study_id} has no recommendation ({study.state.value}): "
            f"`steptune resume {study.study_id}` goes on with it"
        )
    if str(folder) == "-":
        for exporter in chosen:
            output.file.write(exporter.export(recommendation))
        return
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for exporter in chosen:
        path = folder / exporter.file_name(recommendation)
        path.write_text(exporter.export(recommendation), encoding="utf-8")
        left_out = list(exporter.not_expressible(recommendation))
        written.append(
            {"format": exporter.name, "path": str(path), "usage": exporter.usage, "not_expressible": left_out}
        )
        if not as_json:
            output.print(f"{path}  {exporter.usage}", soft_wrap=True, markup=False)
            for sentence in left_out:
                errors.print(f"  not expressed: {sentence}", style="yellow", markup=False)
    if as_json:
        print_json(written)


def verify(
    study_id: StudyId = "last",
    steps: Annotated[int, typer.Option(min=2, help="Steps to train each configuration.")] = 100,
    database: Database = None,
    python: Python = None,
    as_json: AsJson = False,
) -> None:
    """Train baseline and recommendation side by side, and compare their losses."""
    from service.verification import print_verification, verify_study

    settings = settings_with(database)
    with opened_store(settings) as store:
        study = resolve(store, study_id)
        recommendation = store.recommendation(study.study_id)
        if recommendation is None:
            raise StoreError(f"study {study.study_id} has no recommendation to verify ({study.state.value})")
        with errors.status("training") as status:
            verification = verify_study(
                study,
                recommendation,
                steps,
                settings,
                lambda p: status.update(p.text),
                python=str(python) if python else None,
            )
    if as_json:
        print_json(verification)
    else:
        print_verification(output, verification)
    if not verification.same:
        raise typer.Exit(1)
